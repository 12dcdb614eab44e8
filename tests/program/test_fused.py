"""The fused topology: one loop on one device, with the same results, checkpoints and summary as the pipeline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from program_cases import fingerprint, short, stop_at

import qfleet
import qfleet.api as api
from qfleet.accel import cache as accel_cache
from qfleet.accel.choose import key_of
from qfleet.accel.hardware import look
from qfleet.accel.table import Settings
from qfleet.core.errors import CheckpointError, ConfigError, QfleetError
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.roles.fused.choices import workload_of
from qfleet.roles.fused.replay_loop import ReplayLoop
from qfleet.setups import fused_setup, learner_device

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
@pytest.mark.parametrize("cut", [130, pytest.param(777, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize(("algo", "ratio"), [("dqn", 32 / 4 * 1000 / 1200), ("pqn", 4), ("tabular", 1)])
@pytest.mark.parametrize("topology", ["fused", "pipeline"])
def test_samples_per_insert_mean_the_same_in_both_topologies(algo, ratio, topology, tmp_path):
    if algo == "tabular" and topology == "fused":
        pytest.skip("a table is no fused loop")
    run = short(algo, "maze") if algo == "tabular" else fused(algo, topology=topology)
    summary = api.train(run, run_dir=tmp_path / "run").summary
    assert summary["samples_per_insert"] == pytest.approx(ratio, rel=0.05)


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
    events = [json.loads(line) for line in (run.dir / "events.jsonl").read_text().splitlines()]
    assert [event["mean"] for event in events if event["event"] == "evaluation"] == [10, 10]


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


def test_one_rollout_of_which_nearly_all_updates_are_skipped_stops_the_run(tmp_path):
    changes = {"optim.lr": 1e30, "env_steps": 300, "agent": {"rollout_length": 32, "epochs": 4, "minibatches": 16}}
    for topology in ("fused", "pipeline"):
        with pytest.raises(QfleetError, match="updates in a row were not finite"):
            api.train(fused("pqn", topology=topology, **changes), run_dir=tmp_path / topology)


def cartpole(**changes) -> Experiment:
    few = {"env_steps": 1500, "evaluation": {"every": 500, "target": None, "episodes": 4, "test_episodes": 2}}
    return with_changes(preset("cartpole"), {**few, **changes})


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QFLEET_CACHE", str(tmp_path / "cache"))


def events_of(run) -> list[dict]:
    return [json.loads(line) for line in (run.dir / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("topology", ["fused", "pipeline"])
def test_a_resumed_run_says_how_it_is_computed(topology, tmp_path, own_cache):
    api.train(cartpole(topology=topology), run_dir=tmp_path / "run", callbacks=stop_at(700))
    resumed = api.resume(tmp_path / "run")
    assert resumed.summary["accel"].startswith("cpu: fp32, hand-written small network")
    said = [(event["event"], event.get("kind")) for event in events_of(resumed)]
    assert said[said.index(("resumed", None)) + 1] == ("notice", "accel")
    assert api.resume(tmp_path / "run").summary["accel"] == resumed.summary["accel"]  # with nothing left to do


def probe_finds(experiment: Experiment, settings: Settings) -> None:
    setup = fused_setup(experiment, env_spec(experiment.env), UserCode())
    accel_cache.store(key_of(look(torch.device("cpu")), workload_of(setup)), settings, "probed: 2 steps/s")


def test_a_probe_between_cut_and_resume_changes_nothing(tmp_path, own_cache):
    whole = fingerprint(api.train(cartpole(), run_dir=tmp_path / "whole"))
    api.train(cartpole(), run_dir=tmp_path / "cut", callbacks=stop_at(700))
    probe_finds(cartpole(), Settings(kernels=False))
    resumed = api.resume(tmp_path / "cut")
    assert fingerprint(resumed) == whole
    assert "as before the run was cut" in resumed.summary["accel"]
    assert resumed.summary["resume_grade"] == "exact"
    assert "probed" in api.train(cartpole(), run_dir=tmp_path / "next").summary["accel"]


def test_a_run_that_cannot_be_computed_as_before_has_a_lower_grade(tmp_path, own_cache, monkeypatch):
    api.train(cartpole(), run_dir=tmp_path / "run", callbacks=stop_at(700))
    monkeypatch.setenv("QFLEET_NO_NUMBA", "1")
    resumed = api.resume(tmp_path / "run")
    events = events_of(resumed)
    assert next(event for event in events if event["event"] == "resumed")["resume_grade"] == "episode"
    assert resumed.summary["resume_grade"] == "episode"
    assert any(event.get("kind") == "accel_changed" for event in events)
    assert "loops not compiled: QFLEET_NO_NUMBA=1 forbids it" in resumed.summary["accel"]


class Dropping(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1))

    def forward(self, observation):
        return self.layers(observation)


@pytest.mark.parametrize("topology", ["fused", "pipeline"])
def test_layers_of_torch_that_draw_from_its_global_stream_lower_the_grade(topology, tmp_path):
    experiment = cartpole(topology=topology, **{"network.kind": "custom"})
    run = api.train(experiment, network=Dropping, run_dir=tmp_path / "run")
    assert run.summary["resume_grade"] == "episode"
    said = next(event["text"] for event in events_of(run) if event.get("kind") == "inexact")
    assert said.count("Dropout") == 2


def test_a_numba_that_cannot_be_imported_is_done_without_and_named(tmp_path):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less')")
    few = "env_steps=400, evaluation={'episodes': 2, 'test_episodes': 2}"
    code = f"import qfleet; print(qfleet.train('cartpole', run_dir={str(tmp_path / 'run')!r}, {few}).summary['accel'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "loops not compiled: numba cannot be imported (ImportError: Numba needs NumPy 2.3 or less)" in run.stdout


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_a_device_that_is_not_there_is_refused_with_the_reason(device, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device '{device}': torch sees no {device.upper()} device here"):
        api.train(cartpole(device=device), run_dir=tmp_path / "run")


def test_devices_other_than_cuda_are_taken_where_torch_has_them(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    spec = env_spec(cartpole().env)
    assert [learner_device(cartpole(device=device), spec) for device in ("mps", "xpu")] == ["mps", "xpu"]
    assert (cartpole(device="mps").fused, cartpole(device="xpu").fused) == (False, True)
