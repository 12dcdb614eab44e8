"""The fused topology: one loop on one device, with the same results, checkpoints and summary as the pipeline."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from program_cases import fingerprint, short, stop_at

import qfleet
import qfleet.api as api
from qfleet.core.errors import CheckpointError, ConfigError, QfleetError
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.roles.fused.replay_loop import ReplayLoop
from qfleet.setups import fused_setup

GAME = {"env.kind": "tensor", "env.game": "catch"}
ALGORITHMS = ("dqn", "rainbow", "pqn", "prioritised", "noisy", "iqn", "munchausen", "beyond")


def fused(algo: str = "dqn", **changes) -> Experiment:
    return with_changes(short(algo, "catch"), {**GAME, "checkpoint.every": 450, **changes})


@cache
def uncut(algo: str) -> dict[str, str]:
    return fingerprint(api.train(fused(algo), seed=5, run_dir=Path(mkdtemp()) / "uncut"))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_kind_of_agent_runs_fused(algo, tmp_path):
    few = {"agent.head.taus": 4, "agent.head.target_taus": 4, "agent.head.acting_taus": 4} if algo == "iqn" else {}
    run = api.train(fused(algo, **few), seed=1, run_dir=tmp_path / "run")
    summary = run.summary
    assert (summary["topology"], summary["placement"], summary["resume_grade"]) == ("fused", "inline", "exact")
    assert 1200 <= summary["env_steps"] < 1200 + 16 * 33
    assert summary["updates"] > 0
    assert qfleet.load(run.dir).act(np.zeros((3, 1, 10, 5), np.uint8)).shape == (3,)


@pytest.mark.parametrize("algo", ["dqn", "rainbow", "pqn"])
@pytest.mark.parametrize("cut", [130, 777])
def test_trap_15_a_fused_run_cut_and_resumed_equals_uncut(algo, cut, tmp_path):
    first = api.train(fused(algo), seed=5, run_dir=tmp_path / "cut", callbacks=stop_at(cut))
    assert first.summary["stopped_by"] == "callback"
    assert fingerprint(api.resume(tmp_path / "cut")) == uncut(algo)


@pytest.mark.parametrize("period", [0.5, 4.0, 32.0])
def test_trap_9_updates_follow_the_transitions_whatever_the_number_of_environments(period, tmp_path):
    counts = []
    for envs in (1, 16):
        changes = {"learner.train_period": period, "actor.envs": envs, "env_steps": 500}
        summary = api.train(fused(**changes), run_dir=tmp_path / str(envs)).summary
        wanted = (summary["env_steps"] - 200) // period
        counts.append(summary["updates"] / wanted)
    assert counts == pytest.approx([1, 1], rel=0.05)


def test_fused_dqn_learns_catch(tmp_path):
    experiment = with_changes(apply(preset("catch"), "dqn"), {**GAME, "env_steps": 20_000})
    summary = api.train(experiment, seed=1, run_dir=tmp_path / "run").summary
    assert summary["topology"] == "fused"
    assert summary["eval"]["mean"] >= 0.8


def test_a_tensor_game_also_runs_as_a_pipeline(tmp_path):
    summary = api.train(fused(topology="pipeline"), run_dir=tmp_path / "run").summary
    assert (summary["topology"], summary["resume_grade"]) == ("pipeline", "exact")
    assert summary["updates"] > 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"placement": "processes"}, "placement"),
        ({"normalise_rewards": True}, "normalise"),
        ({"replay.storage.kind": "lz4"}, "replay.storage.kind"),
        ({"strict": True}, "strict"),
    ],
)
def test_what_cannot_be_fused_is_refused_and_named(changes, named):
    with pytest.raises(ConfigError, match=named):
        fused(topology="fused", **changes)


def test_other_environments_cannot_be_fused():
    with pytest.raises(ConfigError, match=r"env\.kind 'gym'"):
        short(topology="fused")


def test_auto_takes_the_pipeline_where_fused_does_not_fit():
    assert fused().fused
    assert not fused(normalise_rewards=True).fused
    assert not preset("gym:CartPole-v1").fused


def test_a_nan_reward_changes_nothing_and_stops_the_run(tmp_path, monkeypatch):
    from qfleet.envs.tensor.catch import Catch

    move = Catch.move

    def broken(self, state, action, random):
        following, reward, over = move(self, state, action, random)
        return following, torch.full_like(reward, torch.nan), over

    monkeypatch.setattr(Catch, "move", broken)
    with pytest.raises(QfleetError, match="not finite"):
        api.train(fused(), run_dir=tmp_path / "run")


class Normed(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16))

    def forward(self, observation):
        return self.layers(observation)


def loop_of(**changes) -> ReplayLoop:
    experiment = with_changes(preset("cartpole"), {"learner.learning_starts": 64, **changes})
    network = Normed if changes.get("network.kind") == "custom" else None
    return ReplayLoop(fused_setup(experiment, env_spec(experiment.env), UserCode(network=network)))


def test_dropout_is_off_while_acting():
    loop = loop_of(**{"network.dropout": 0.5})
    loop.advance()
    seen = []

    def twice(observation, values=loop._values):
        seen.append(torch.equal(values(observation).clone(), values(observation)))
        return values(observation)

    loop._values = twice
    loop.advance()
    assert len(seen) == 32
    assert all(seen)


def test_acting_leaves_a_users_batch_statistics_alone_even_with_one_environment():
    loop = loop_of(**{"network.kind": "custom", "actor.envs": 1, "learner.learning_starts": 10**4})
    loop.advance()
    state = loop.update.online.state_dict()
    assert [int(value) for name, value in state.items() if "num_batches" in name] == [0]


def test_a_rate_that_falls_to_zero_reaches_it_with_the_last_rollout(tmp_path):
    rates = []

    class Rates:
        def metrics(self, record):
            rates.append(record["learning_rate"])

        def event(self, event):
            pass

        def close(self):
            pass

    changes = {"optim.schedule.kind": "linear", "track.every_s": 1e-6, "env_steps": 4000}
    api.train(fused("pqn", **changes), run_dir=tmp_path / "run", sinks=[Rates()])
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.15 * rates[0]
    assert rates.count(0.0) <= 4  # two records of the rollout that passes the budget, two of the end
    assert len(rates) > 12


def test_an_evaluation_ends_at_its_longest_episode(tmp_path):
    changes = {"env_steps": 1000, "evaluation": {"every": 500, "target": None, "max_episode_steps": 10}}
    run = api.train(with_changes(preset("cartpole"), changes), run_dir=tmp_path / "run")
    means = [json.loads(line).get("mean", 10) for line in (run.dir / "events.jsonl").read_text().splitlines()]
    assert set(means) == {10}


def test_a_checkpoint_of_another_device_is_refused_with_words():
    loop = loop_of()
    state = {**loop.state_dict(), "device": "cuda"}
    with pytest.raises(CheckpointError, match="saved on device 'cuda'"):
        loop.load_state_dict(state)


@pytest.mark.parametrize(
    ("algo", "changes", "named"),
    [
        ("pqn", {"agent.minibatches": 5000}, r"agent\.minibatches 5000 exceeds"),
        ("dqn", {"actor.envs": 4096}, "nothing would be learned"),
        ("dqn", {"agent.n_step": 1000}, "nothing would be learned"),
    ],
)
def test_a_run_that_would_learn_nothing_is_refused(algo, changes, named):
    with pytest.raises(ConfigError, match=named):
        fused(algo, **changes)


def test_a_few_updates_that_are_not_finite_stop_the_run_though_others_were(tmp_path):
    with pytest.raises(QfleetError, match="not finite"):
        api.train(fused(**{"optim.lr": 1e30, "env_steps": 3000}), run_dir=tmp_path / "run")
    kinds = [json.loads(line).get("kind") for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert kinds.count("skipped_update") == 0
