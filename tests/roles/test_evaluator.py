"""The evaluator: bounded steps, the same result however often it is interrupted, the true scores."""

from __future__ import annotations

import numpy as np
from role_cases import Edge

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters, checksum
from qfleet.algo.networks import build_network
from qfleet.algo.torsos import MlpConfig
from qfleet.core.role import DONE, WORKED, Idle
from qfleet.core.types import Evaluated, Version, Weights
from qfleet.core.usercode import UserCode
from qfleet.envs import GymConfig, env_spec
from qfleet.roles.evaluator import EvaluationConfig, Evaluator, EvaluatorHandles, EvaluatorSetup

ENV, NETWORK = GymConfig(id="CartPole-v1"), MlpConfig(hidden=(8,))


def make_evaluator(**settings: object) -> tuple[Evaluator, EvaluatorHandles]:
    config = EvaluationConfig(episodes=6, envs=4, **settings)
    setup = EvaluatorSetup(config, ENV, env_spec(ENV), NETWORK, ReplayAgent(), seed=0, code=UserCode())
    handles = EvaluatorHandles(models=Edge(), events=Edge(), score=Edge())
    return Evaluator(setup, handles), handles


def weights(seed: int, number: int = 1) -> Weights:
    flat = FlatParameters(build_network(NETWORK, ReplayAgent(), env_spec(ENV), seed=seed)).to_numpy()
    return Weights(Version(0, number), flat, checksum(flat), env_steps=1000 * number)


def evaluated(evaluator: Evaluator, handles: EvaluatorHandles) -> Evaluated:
    for _ in range(1000):
        assert evaluator.step() == WORKED
        if handles.events.queue:
            return handles.events.receive()
    raise AssertionError("no result")


def test_scores_are_those_of_the_episodes_whatever_the_number_of_environments():
    few, few_handles = make_evaluator()
    handles_by_one = EvaluatorHandles(models=Edge(), events=Edge(), score=Edge())
    one = Evaluator(
        EvaluatorSetup(EvaluationConfig(episodes=6, envs=1), ENV, env_spec(ENV), NETWORK, ReplayAgent(), 0, UserCode()),
        handles_by_one,
    )
    few_handles.models.send(weights(3))
    handles_by_one.models.send(weights(3))
    first, second = evaluated(few, few_handles), evaluated(one, handles_by_one)
    assert first.returns.tolist() == second.returns.tolist()
    assert first.lengths.tolist() == first.returns.tolist()  # CartPole pays 1 for every step
    assert len(first.returns) == 6


def test_an_evaluation_that_is_saved_half_way_begins_anew_and_ends_the_same(monkeypatch):
    from qfleet.roles import evaluator as module

    monkeypatch.setattr(module, "_TICKS", 3)
    whole, whole_handles = make_evaluator(epsilon=0.5)
    whole_handles.models.send(weights(3))
    expected = evaluated(whole, whole_handles)
    part, part_handles = make_evaluator(epsilon=0.5)
    part_handles.models.send(weights(3))
    for _ in range(2):
        assert part.step() == WORKED
    assert not part_handles.events.queue
    rest, rest_handles = make_evaluator(epsilon=0.5)
    rest.load_state_dict(part.state_dict())
    assert evaluated(rest, rest_handles).returns.tolist() == expected.returns.tolist()


def test_a_long_evaluation_takes_many_steps(monkeypatch):
    from qfleet.roles import evaluator as module

    monkeypatch.setattr(module, "_TICKS", 3)
    role, handles = make_evaluator()
    handles.models.send(weights(3))
    steps = 0
    while not handles.events.queue:
        assert role.step() == WORKED
        assert role.phase == "evaluating" or handles.events.queue
        steps += 1
    assert steps > 3


def test_the_best_is_told_with_its_weights_and_of_equals_the_later():
    role, handles = make_evaluator()
    results = []
    for number in (1, 2):
        handles.models.send(weights(3, number))
        results.append(evaluated(role, handles))
    assert [r.best for r in results] == [True, True]
    assert results[1].weights is not None
    assert results[1].weights.version == Version(0, 2)
    scores = list(handles.score.queue)
    assert all(score.weights is None for score in scores)
    assert np.array_equal(scores[0].returns, results[0].returns)


def test_the_end_of_the_models_is_the_end():
    role, handles = make_evaluator()
    assert isinstance(role.step(), Idle)
    handles.models.close()
    assert role.step() == DONE
