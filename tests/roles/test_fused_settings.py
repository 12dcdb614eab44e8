"""What a fused run's settings do: each test fails when its setting is dropped on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from role_cases import Edge

from qfleet.accel import choices
from qfleet.accel.hardware import Hardware
from qfleet.core.spec import PLAIN
from qfleet.core.types import Evaluated, Notice
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.roles.fused import Fused, FusedHandles, FusedSetup
from qfleet.roles.fused.evaluation import DeviceEvaluation
from qfleet.roles.fused.memory import evaluation_bytes
from qfleet.roles.fused.replay_loop import ReplayLoop
from qfleet.roles.fused.rollout_loop import RolloutLoop
from qfleet.setups import fused_setup

SMALL = {
    "device": "cpu",
    "network.hidden": [8],
    "learner.batch_size": 16,
    "learner.learning_starts": 64,
    "evaluation.target": None,
}


def setup(algo: str = "dqn", **changes: Any) -> FusedSetup:
    experiment = with_changes(apply(preset("cartpole"), algo), {**SMALL, **changes})
    return fused_setup(experiment, env_spec(experiment.env), UserCode())


def role(run: FusedSetup) -> tuple[Fused, list[Any]]:
    edges = {name: Edge() for name in ("events", "env_steps", "updates", "samples")}
    return Fused(run, FusedHandles(**edges)), edges["events"].queue


@pytest.mark.parametrize(
    ("changes", "reward"),
    [({"env.reward_scale": 0.5}, 0.5), ({"env.reward_scale": 2.0, "env.reward_clip": 0.25}, 0.5)],
)
def test_rewards_are_clipped_and_then_scaled_before_they_are_learned_from(
    changes: dict[str, Any], reward: float
) -> None:
    run = ReplayLoop(setup(**{"agent.n_step": 1, **changes}))
    run.advance()
    assert set(run.grid.sample(256, run._beta).batch.reward.tolist()) == {reward}
    rollouts = RolloutLoop(setup("pqn", **changes))
    _, rewards = zip(*(rollouts.tick() for _ in range(5)), strict=True)
    assert set(torch.stack(rewards).flatten().tolist()) == {reward}


def test_importance_weights_follow_their_schedule() -> None:
    run = ReplayLoop(setup("prioritised", **{"env_steps": 4000, "replay.sampler.beta_start": 0.4}))
    weights = []
    learn = run.update.learn
    run.update.learn = lambda batch: (weights.append(batch.weight.clone()), learn(batch))[1]  # type: ignore[method-assign]
    while run.steps < 2000:
        run.advance()
    assert run._beta.item() == pytest.approx(0.4 + 0.6 * run.steps / 4000, abs=0.01)
    assert weights[-1].min() < 0.9
    assert weights[-1].max() <= 1


def test_errors_of_a_batch_become_the_priorities_of_its_items() -> None:
    run = ReplayLoop(setup("prioritised", **{"replay.sampler.alpha": 1.0}))
    while not run.update.updates:
        run.advance()
    sample = run.grid.sample(16, run._beta)
    expected = run._learn_from(sample).priority
    after = run.grid.sample(65536, run._beta)
    drawn = torch.bincount(after.index, minlength=int(sample.index.max()) + 1)[sample.index].double()
    assert np.corrcoef(drawn.numpy(), expected.double().numpy())[0, 1] > 0.9


def test_the_network_that_was_asked_for_is_evaluated() -> None:
    online, target = (ReplayLoop(setup(**{"learner.evaluated": which})) for which in ("online", "target"))
    for run in (online, target):
        while not run.update.updates:
            run.advance()
    assert torch.equal(online.evaluated.parameters, online.update.flat.parameters)
    assert torch.equal(target.evaluated.parameters, target.update.target_flat.parameters)
    assert not torch.equal(target.evaluated.parameters, target.update.flat.parameters)


def test_an_evaluation_plays_every_episode_to_its_end_and_the_same_weights_play_the_same() -> None:
    run = setup(**{"evaluation.episodes": 7, "evaluation.epsilon": 0.0})
    loop = ReplayLoop(run)
    evaluation = DeviceEvaluation(run, loop.choices)
    returns, lengths = evaluation.play(loop.evaluated)
    assert returns.shape == lengths.shape == (7,)
    assert np.array_equal(returns, lengths)  # one reward for each step
    assert len(set(returns.tolist())) > 1
    again, _ = evaluation.play(loop.evaluated)
    assert np.array_equal(again, returns)
    loop.evaluated.parameters.normal_(generator=torch.Generator().manual_seed(1))
    other, _ = evaluation.play(loop.evaluated)
    assert not np.array_equal(other, returns)


def test_an_evaluation_leaves_the_training_alone() -> None:
    run = setup(env_steps=2000)
    loop, watched = ReplayLoop(run), ReplayLoop(run)
    evaluation = DeviceEvaluation(run, watched.choices)
    for _ in range(4):
        loop.advance()
        evaluation.play(watched.evaluated)
        watched.advance()
    assert torch.equal(loop.update.flat.parameters, watched.update.flat.parameters)
    assert torch.equal(loop.player.observation[PLAIN], watched.player.observation[PLAIN])


def test_an_evaluation_takes_memory_for_its_episodes() -> None:
    few, many = (evaluation_bytes(setup(**{"evaluation.episodes": episodes})) for episodes in (1, 1000))
    assert many == 1000 * few > 0


def test_settings_without_effect_are_named_once() -> None:
    _, events = role(setup(**{"actor.unroll": 64, "learner.publish_period": 7}))
    texts = [event.text for event in events if isinstance(event, Notice) and event.kind == "no_effect"]
    assert texts == ["a fused loop makes no use of actor.unroll and learner.publish_period"]
    assert not [event for event in role(setup())[1] if event.kind == "no_effect"]


def test_a_form_of_weights_for_actors_has_no_effect_where_there_are_none() -> None:
    _, events = role(setup(**{"learner.weights.kind": "delta"}))
    (text,) = [event.text for event in events if isinstance(event, Notice) and event.kind == "no_effect"]
    assert text.endswith("makes no use of learner.weights")


def test_acting_in_another_precision_is_for_a_pipeline() -> None:
    experiment = with_changes(preset("cartpole"), {"inference.precision": "bf16"})
    assert not experiment.fused
    assert "inference.precision 'bf16'" in experiment.why_not_fused


def test_a_rollout_of_only_resets_changes_nothing_and_is_no_skipped_update() -> None:
    one = {"actor.envs": 1, "agent.rollout_length": 1, "agent.minibatches": 1, "agent.epochs": 2, "env_steps": 400}
    run, events = role(setup("pqn", **{**one, "evaluation.every": 10**6}))
    loop, resets = run._loop, 0
    assert isinstance(loop, RolloutLoop)
    while loop.steps < 300:
        reset = bool(loop.player.state["ended"][0])
        before, updates = loop.update.flat.parameters.clone(), loop.update.updates
        run.step()
        assert torch.equal(before, loop.update.flat.parameters) == reset
        assert loop.update.updates - updates == (0 if reset else 2)
        resets += reset
    assert resets > 5
    assert run.metrics()["skipped_updates"] == 0
    assert {event.kind for event in events if isinstance(event, Notice)} == {"accel"}
    assert not [event for event in events if isinstance(event, Evaluated)]


def test_deterministic_operations_are_switched_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(choices, "look", lambda device: Hardware("cuda", "some GPU", (9, 0)))
    plain = {"accel.kernels": "off", "accel.compile": "off", "accel.precision": "fp32"}
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark

    def switches() -> tuple[bool, bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark

    first, _ = role(setup("pqn", **plain, **{"accel.deterministic": True}))
    assert switches() == (True, True, False)
    role(setup("pqn", **plain))
    assert switches() == before
    first, _ = role(setup("pqn", **plain, **{"accel.deterministic": True}))
    assert switches() == (True, True, False)
    first.close()
    assert switches() == before
