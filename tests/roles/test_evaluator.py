"""The evaluator: bounded steps, the same result however often it is interrupted, the true scores."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from role_cases import Edge

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters, checksum
from qfleet.algo.networks import build_network
from qfleet.algo.recurrent import MemoryConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.core.errors import ConfigError, EnvironmentFault
from qfleet.core.role import DONE, WORKED, Idle
from qfleet.core.spec import PLAIN
from qfleet.core.types import Evaluated, Version, Weights
from qfleet.core.usercode import UserCode
from qfleet.envs import GymConfig, Tick, VectorEnv, env_spec, make_env
from qfleet.roles import evaluator as evaluator_module
from qfleet.roles.evaluator import (
    EvaluationConfig,
    Evaluator,
    EvaluatorHandles,
    EvaluatorSetup,
    FinalTest,
    play,
    playing,
)

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


def test_a_final_test_sends_back_no_weights_whoever_asked_has_them():
    """They took shared memory that nobody had counted, at the very end of a run."""
    evaluator, handles = make_evaluator()
    test = FinalTest(evaluator._setup, handles)
    handles.models.send(weights(3))
    result = evaluated(test, handles)
    assert (result.best, result.weights, len(result.returns)) == (False, None, 6)


def test_the_end_of_the_models_is_the_end():
    role, handles = make_evaluator()
    assert isinstance(role.step(), Idle)
    handles.models.close()
    assert role.step() == DONE


def test_an_environment_that_is_lost_after_its_episode_keeps_its_score():
    """It is stepped on until the others have ended, and what happens to it then does not count."""
    network = build_network(NETWORK, ReplayAgent(), env_spec(ENV), seed=0)
    env = Scripted(ends_at=(2, 6), lost_at={4: 0, 5: 1})
    scores, lengths = play(network, env, EvaluationConfig(episodes=2, envs=2), seed=0, split="test", episodes=2)
    assert scores.tolist() == [2.0, 1.0]
    assert lengths.tolist() == [2, 1]


class Scripted:
    """Two environments that pay 1 for each step, end where they are told to, and are lost for a tick in between."""

    num_envs = 2

    def given_up(self) -> tuple[int, ...]:
        return ()

    def __init__(self, ends_at: tuple[int, int], lost_at: dict[int, int]) -> None:
        self._ends_at, self._lost_at, self._ticks = ends_at, lost_at, 0
        self._scores = np.zeros(2)

    def reset(self, seeds: list[int]) -> tuple[dict[str, np.ndarray], None]:
        return {PLAIN: np.zeros((2, 4), np.float32)}, None

    def step(self, action: np.ndarray) -> Tick:
        self._ticks += 1
        cut = np.array([self._lost_at[self._ticks]] if self._ticks in self._lost_at else [], np.int64)
        valid = ~np.isin(np.arange(2), cut)
        self._scores = np.where(valid, self._scores + 1, 0.0)
        scored = np.flatnonzero(np.array(self._ends_at) == self._ticks)
        scores, none = self._scores[scored], np.zeros(2, bool)
        self._scores[scored] = 0.0
        return Tick(
            observation={PLAIN: np.zeros((2, 4), np.float32)}, mask=None, reward=np.ones(2, np.float32),
            terminated=np.isin(np.arange(2), scored), truncated=none, valid=valid,
            final_observation={PLAIN: np.zeros((0, 4), np.float32)}, final_mask=None, finished=scored,
            scores=scores, score_lengths=scores.astype(np.int64), scored=scored, cut=cut,
        )  # fmt: skip


def test_it_computes_on_the_gpu_whose_turn_it_is(monkeypatch):
    turns = []
    monkeypatch.setattr(evaluator_module, "own_device", lambda *asked: (turns.append(asked), "cpu")[1])
    evaluator, handles = make_evaluator()
    Evaluator(dataclasses.replace(evaluator._setup, device="cuda", turn=-1), handles)
    assert turns == [("cpu", None), ("cuda", -1)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("agent", [ReplayAgent(), ReplayAgent(memory=MemoryConfig(hidden=8))])
def test_on_a_gpu_the_scores_are_nearly_the_cpus(agent: ReplayAgent) -> None:
    network = build_network(NETWORK, agent, env_spec(ENV), seed=3)
    config = EvaluationConfig(episodes=20, envs=20)
    on_cpu, _ = play(network, make_env(ENV, 20, evaluation=True), config, 0, "validation", 20)
    game = playing(network.cuda(), make_env(ENV, 20, evaluation=True), config, 0, "validation", 20, "cuda")
    while True:
        try:
            next(game)
        except StopIteration as end:
            on_gpu, _ = end.value
            break
    assert np.mean(on_cpu == on_gpu) >= 0.9, "a last digit may decide an action now and then"
    assert on_cpu.std() > 0


def test_where_ticks_take_long_a_step_makes_one_and_the_scores_are_the_same():
    """A hundred ticks of an environment that takes a minute for each would be taken for a hang."""
    whole, whole_handles = make_evaluator()
    slow, slow_handles = make_evaluator()
    slow._setup = dataclasses.replace(slow._setup, longest_step_s=0.0)
    whole_handles.models.send(weights(3))
    slow_handles.models.send(weights(3))
    expected, steps = evaluated(whole, whole_handles), 0
    while not slow_handles.events.queue:
        assert slow.step() == WORKED
        steps += 1
    result = slow_handles.events.receive()
    assert result.returns.tolist() == expected.returns.tolist()
    waves = [result.lengths[:4], result.lengths[4:]]
    assert steps >= sum(int(wave.max()) for wave in waves)


class Unreliable:
    """Environments of which one is given up after some ticks."""

    def __init__(self, env: VectorEnv, after: int) -> None:
        self._env, self._after = env, after

    def __getattr__(self, name: str) -> object:
        return getattr(self._env, name)

    def step(self, action: np.ndarray) -> Tick:
        self._after -= 1
        return self._env.step(action)

    def given_up(self) -> list[int]:
        return [2] if self._after <= 0 else []

    def incidents(self) -> list[str]:
        return ["environment 2: the robot fell over; the run goes on without it"]


def test_an_evaluation_without_one_of_its_episodes_is_none() -> None:
    """It scored 0, and nothing said so."""
    network = build_network(NETWORK, ReplayAgent(), env_spec(ENV), seed=0)
    config = EvaluationConfig(episodes=4, envs=4)
    for after, words in (
        (3, "environment 2: its episode of this evaluation has no score.*the robot fell over"),
        (10**6, ""),
    ):
        env = Unreliable(make_env(ENV, 4, evaluation=True), after)
        with pytest.raises(EnvironmentFault, match=words) if words else contextlib.nullcontext():
            play(network, env, config, 0, "validation", 4)  # type: ignore[arg-type]


class Registered:
    """A keep of a second life, in which the environment cannot be made any more."""

    life, gone, planned, meeting = 1, 0, False, ""

    def committed(self) -> None:
        return None

    def commit(self, state: object) -> None:
        pass


def test_what_a_former_life_could_make_is_no_mistake_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **rest: object) -> None:
        raise ConfigError("the simulator's licence is gone")

    for keep, error in ((None, ConfigError), (Registered(), EnvironmentFault)):
        evaluator, handles = make_evaluator()
        monkeypatch.setattr(evaluator_module, "make_env", broken)
        evaluator._handles = dataclasses.replace(handles, keep=keep)
        handles.models.send(weights(1))
        with pytest.raises(error, match="licence"):
            evaluator.step()
