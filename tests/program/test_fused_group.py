"""Fused loops that learn as one, in real processes: they finish, learn, resume exactly, and survive deaths or tell."""

from __future__ import annotations

import json
import os
import signal
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from program_cases import digest, fingerprint, stop_at

import qfleet.api as api
import qfleet.session
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import ConfigError, QfleetError
from qfleet.core.failpoints import VARIABLE
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.program import place
from qfleet.runtime import checkpoint

COMMON: dict[str, Any] = {
    "learners": 2,
    "device": "cpu",
    "evaluation": {"every": 1000, "episodes": 4, "envs": 4, "test_episodes": 4, "max_episode_steps": 200},
    "evaluation.target": None,
    "checkpoint.every": 900,
}
SHORT = {"rollout_length": 8, "minibatches": 2, "epochs": 1}
BREAKOUT = {**COMMON, "env_steps": 3000, "actor.envs": 32, "agent": SHORT}
CARTPOLE = {**COMMON, "env_steps": 3000, "actor.envs": 8, "learner.learning_starts": 200, "learner.batch_size": 64}


def group(name: str, **changes: Any) -> Experiment:
    """Two loops: PQN in breakout, or DQN in cartpole."""
    return with_changes(preset(name), {**(BREAKOUT if name == "minatar:breakout" else CARTPOLE), **changes})


@cache
def uncut(name: str) -> api.Run:
    return api.train(group(name), seed=5, run_dir=Path(mkdtemp()) / "uncut")


def states(run: api.Run) -> list[dict[str, Any]]:
    last = checkpoint.complete(run.dir / "checkpoints")[-1]
    return [checkpoint.read_state(last, f"fused-{rank}")["loop"] for rank in (0, 1)]


def events_of(run: api.Run, kind: str) -> list[dict[str, Any]]:
    lines = (run.dir / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


@pytest.mark.parametrize("name", ["minatar:breakout", "cartpole"])
def test_two_loops_share_a_run(name):
    run = uncut(name)
    summary, (first, second) = run.summary, states(run)
    assert (summary["topology"], summary["placement"], summary["resume_grade"]) == ("fused", "processes", "exact")
    assert 3000 <= summary["env_steps"] < 3000 + 8 * 32
    steps = [int(state["player"]["counts"]["steps"]) for state in (first, second)]
    assert sum(steps) == summary["env_steps"]
    assert min(steps) > 1000
    assert (first["update"]["step"]["weights"] == second["update"]["step"]["weights"]).all()
    assert first["update"]["step"]["count"] == second["update"]["step"]["count"] == summary["updates"] > 0
    assert len(events_of(run, "evaluation")) == 3, "one rank evaluates"
    last = json.loads((run.dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["gradient_bytes"] > 0


def test_two_loops_learn_cartpole():
    summary = uncut("cartpole").summary
    assert summary["updates"] == (summary["env_steps"] - 200) // 8
    assert summary["eval"]["mean"] > 40


@pytest.mark.parametrize("name", [pytest.param("minatar:breakout", marks=pytest.mark.slow), "cartpole"])
def test_trap_15_a_group_cut_and_resumed_equals_uncut(name, tmp_path):
    first = api.train(group(name), seed=5, run_dir=tmp_path / "cut", callbacks=stop_at(700))
    assert first.summary["stopped_by"] == "callback"
    assert first.summary["env_steps"] < 3000
    assert fingerprint(api.resume(tmp_path / "cut")) == fingerprint(uncut(name))


@pytest.mark.parametrize("name", ["minatar:breakout", "cartpole"])
def test_loops_that_take_turns_in_one_process_have_the_numbers_of_processes(name, tmp_path):
    """To the byte: a sum over two ranks has one order only."""
    run = api.train(group(name, placement="inline"), seed=5, run_dir=tmp_path / "whole")
    assert (run.summary["topology"], run.summary["placement"]) == ("fused", "inline")
    assert fingerprint(run)["model"] == fingerprint(uncut(name))["model"]
    last = checkpoint.complete(run.dir / "checkpoints")[-1]
    ranks = [state["loop"] for state in checkpoint.read_state(last, "fused-0")["ranks"]]
    assert [digest(state) for state in ranks] == [digest(state) for state in states(uncut(name))]
    api.train(group(name, placement="inline"), seed=5, run_dir=tmp_path / "cut", callbacks=stop_at(700))
    assert fingerprint(api.resume(tmp_path / "cut")) == fingerprint(run)


class Killer:
    """Kills a rank when the run has come a number of steps; well after a checkpoint, if it is told where these are."""

    def __init__(self, at: int, saved: Path | None = None, every: int = 0) -> None:
        self._at, self._saved, self._every, self.placement = at, saved, every, None

    def on_step(self, metrics: dict[str, Any], stop: Any) -> None:
        if self._at and metrics["env_steps"] >= self._at and self._well_after(metrics["env_steps"]):
            os.kill(self.placement.pids()["fused-1"], signal.SIGKILL)
            self._at = 0

    def _well_after(self, env_steps: int) -> bool:
        """Return whether a third of the way from the last checkpoint to the next one is made."""
        if self._saved is None:
            return True
        made = checkpoint.complete(self._saved)
        return bool(made) and env_steps - int(made[-1].name) > self._every / 3

    def placed(self, *arguments: Any) -> Any:
        self.placement = place(*arguments)
        return self.placement


def test_loops_of_rollouts_are_begun_anew_together_and_lose_nothing_but_time(tmp_path, monkeypatch):
    killer = Killer(at=1200)
    monkeypatch.setattr(qfleet.session, "place", killer.placed)
    experiment = group("minatar:breakout", **{"learner.snapshot_s": 0.05})
    run = api.train(experiment, seed=5, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=killer.on_step))
    causes = {event["index"]: event["cause"] for event in events_of(run, "restart")}
    assert set(causes) == {0, 1}
    assert "SIGKILL" in causes[1]
    told = [event["text"] for event in events_of(run, "notice") if event["kind"] == "restarted"]
    assert len(told) == 1
    assert not [event for event in events_of(run, "notice") if event["kind"] == "no_effect"]
    assert fingerprint(run)["model"] == fingerprint(uncut("minatar:breakout"))["model"]
    for name in ("env_steps", "updates", "samples_per_insert"):
        assert run.summary[name] == uncut("minatar:breakout").summary[name]


@pytest.mark.slow
def test_what_was_counted_before_a_resume_is_not_taken_for_lost_in_a_death_after_it(tmp_path, monkeypatch):
    whole = uncut("minatar:breakout")
    api.train(group("minatar:breakout"), seed=5, run_dir=tmp_path / "run", callbacks=stop_at(700))
    killer = Killer(at=1500)
    monkeypatch.setattr(qfleet.session, "place", killer.placed)
    run = api.resume(tmp_path / "run", callbacks=Callbacks(on_step=killer.on_step))
    assert {event["index"] for event in events_of(run, "restart")} == {0, 1}
    assert fingerprint(run)["model"] == fingerprint(whole)["model"]
    for name in ("env_steps", "updates", "samples_per_insert"):
        assert run.summary[name] == whole.summary[name]


@pytest.mark.slow
def test_a_death_before_anything_was_kept_begins_the_run_anew(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "fused-1/worker.step:kill@3")
    run = api.train(group("minatar:breakout"), seed=5, run_dir=tmp_path / "run")
    assert {event["index"] for event in events_of(run, "restart")} == {0, 1}
    assert fingerprint(run)["model"] == fingerprint(uncut("minatar:breakout"))["model"]


def test_loops_with_a_replay_go_back_to_the_last_checkpoint_together_and_say_what_that_costs(tmp_path, monkeypatch):
    long = {"env_steps": 12_000, "evaluation.every": 6000}  # so that it is not over when a checkpoint is written
    whole = api.train(group("cartpole", **long), seed=5, run_dir=tmp_path / "whole")
    killer = Killer(at=1200, saved=tmp_path / "run" / "checkpoints", every=3000)
    monkeypatch.setattr(qfleet.session, "place", killer.placed)
    experiment = group("cartpole", **long, **{"checkpoint.every": 3000})
    run = api.train(experiment, seed=5, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=killer.on_step))
    (told,) = [event["text"] for event in events_of(run, "notice") if event["kind"] == "restarted"]
    assert told.startswith("fused[1] failed: its process was killed by SIGKILL")
    assert "all loops were restarted from update" in told
    assert int(told.split()[-3]) > 0
    (death,) = events_of(run, "restart")
    assert (death["role"], death["index"], death["life"]) == ("fused", 1, 1)
    assert death["cause"].startswith("its process was killed by SIGKILL")
    assert death["seconds_to_repair"] > 0
    assert len(events_of(run, "resumed")) == 1
    assert fingerprint(run) == fingerprint(whole)


@pytest.mark.slow
def test_loops_with_a_replay_that_die_again_and_again_end_the_run_which_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "fused-1/worker.step:kill@6")
    mortal = group("cartpole", **{"checkpoint.every": 200, "survival.restarts": 1})
    words = r"fused\[1\] failed: its process was killed by SIGKILL.*death 2 in a row .* \(survival.restarts 1\)"
    with pytest.raises(QfleetError, match=words):
        api.train(mortal, seed=5, run_dir=tmp_path / "run")
    assert checkpoint.complete(tmp_path / "run" / "checkpoints")
    monkeypatch.delenv(VARIABLE)
    assert fingerprint(api.resume(tmp_path / "run")) == fingerprint(uncut("cartpole"))


def test_several_learners_bring_their_placement_unless_one_is_given():
    for name in ("minatar:breakout", "cartpole"):
        experiment = with_changes(preset(name), {"learners": 2})
        assert (experiment.placement, experiment.fused, experiment.beside) == ("processes", True, False)
        assert with_changes(preset(name), {"learners": 1}).placement == "inline"
        asked = with_changes(preset(name), {"learners": 2, "placement": "inline"})
        assert (asked.placement, asked.fused) == ("inline", True)
    served = with_changes(preset("cartpole"), {"learners": 2, "parallel.update.kind": "server"})
    assert (served.placement, served.fused) == ("processes", False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor.envs": 15}, r"actor\.envs 15 is not a multiple of learners 2"),
        ({"learner.batch_size": 63}, r"learner\.batch_size 63 is not a multiple of learners 2"),
        ({"parallel.tensor": 2}, r"parallel\.tensor"),
        ({"actors": 2}, r"actors 2"),
        ({"placement": "ray"}, r"'fused' needs placement 'processes' or 'inline' for learners 2, not 'ray'"),
        ({"network.input": {"normalize": True, "scale": []}}, r"network\.input\.normalize needs one learner"),
        ({"optim.schedule.kind": "plateau"}, r"plateau.* needs one learner"),
    ],
)
def test_what_loops_cannot_share_is_refused_and_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        group("cartpole", topology="fused", **changes)


def test_rollouts_are_shared_by_fused_loops_only():
    with pytest.raises(ConfigError, match=r"learners 2 of agent\.kind 'rollout' need the fused topology, which.*ray"):
        group("minatar:breakout", placement="ray")
    with pytest.raises(ConfigError, match=r"agent\.minibatches 200 exceeds the 128 samples"):
        group("minatar:breakout", **{"agent.minibatches": 200})
