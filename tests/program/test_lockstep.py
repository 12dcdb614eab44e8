"""Lock-step: roles in processes of their own give the numbers of inline to the byte, round by round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from program_cases import short, states, stop_at

import qfleet.api as api
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment
from qfleet.observe.sinks import read_jsonl

SLOW = pytest.mark.slow
LOCKSTEP = {"placement": "processes", "lockstep": True}
TIMED = ("time", "wall_s", "seconds", "env_steps_per_s", "updates_per_s", "eta_s", "bottleneck")
EVERY_ROUND_S = 1e-9
CASES: dict[str, dict[str, Any]] = {
    "dqn": {},
    "prioritised": {"agent.n_step": 3, "actors": 2, "actor.envs": 4},
    "nstep": {"learner.updates_per_draw": 3, "learner.train_period": 4.0},
    "pqn": {"actors": 2, "actor.envs": 4, "agent.rollout_length": 8},
    "tabular": {"actors": 2, "actor.envs": 1, "env_steps": 120, "evaluation.every": 50},
    "r2d2": {"actors": 2, "actor.envs": 4, "learner.train_period": 24.0, "replay.sampler.initial": "actor"},
}


def tiny(algo: str, **changes: Any) -> Experiment:
    small: dict[str, Any] = {
        "env_steps": 240,
        "learner.learning_starts": 100,
        "learner.batch_size": 8,
        "learner.train_period": 8.0,
        "evaluation.every": 100,
        "evaluation.max_episode_steps": 40,
        "checkpoint.every": 130,
    }
    if algo != "tabular":
        small |= {"network.kind": "mlp", "network.hidden": [16]}
    name = {"tabular": "maze", "pqn": "catch"}.get(algo, "cartpole")
    return short(algo, name, **{**small, **CASES[algo], **changes})


class Records:
    """Keeps of every record and event what does not depend on the clock."""

    def __init__(self) -> None:
        self.metrics_seen: list[dict[str, Any]] = []
        self.events_seen: list[dict[str, Any]] = []

    def metrics(self, record: dict[str, Any]) -> None:
        timed = (*TIMED, *(name for name in record if name.endswith((".busy", ".rate"))))
        self.metrics_seen.append({name: value for name, value in record.items() if name not in timed})

    def event(self, record: dict[str, Any]) -> None:
        if record["event"] in ("evaluation", "checkpoint"):
            self.events_seen.append({name: value for name, value in record.items() if name not in TIMED})

    def close(self) -> None:
        pass


def in_order(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events by the steps that they are of: a checkpoint is told of when it is written, beside the run."""
    return sorted(events, key=lambda event: (event["env_steps"], event["event"]))


def trained(experiment: Experiment, directory: Path) -> tuple[dict[str, str], Records]:
    records = Records()
    run = api.train(experiment, seed=5, run_dir=directory, sinks=[records], **{"track.every_s": EVERY_ROUND_S})
    return states(run), records


@pytest.mark.parametrize("algo", CASES)
def test_lockstep_has_inlines_states_and_its_metrics_in_every_round(algo, tmp_path):
    inline, seen_inline = trained(tiny(algo), tmp_path / "inline")
    lockstep, seen_lockstep = trained(tiny(algo, **LOCKSTEP), tmp_path / "lockstep")
    assert len(seen_inline.metrics_seen) > 20
    assert seen_lockstep.metrics_seen == seen_inline.metrics_seen
    assert in_order(seen_lockstep.events_seen) == in_order(seen_inline.events_seen)
    assert {"actor", "learner", "evaluator"} <= {name.split("/")[-1].split("-")[0] for name in inline}
    assert lockstep == inline


@pytest.mark.parametrize("algo", ["dqn", *(pytest.param(algo, marks=SLOW) for algo in CASES if algo != "dqn")])
def test_lockstep_on_ray_has_inlines_states_and_its_metrics_in_every_round(algo, tmp_path, ray_session):
    inline, seen_inline = trained(tiny(algo), tmp_path / "inline")
    on_ray, seen_on_ray = trained(tiny(algo, placement="ray", lockstep=True), tmp_path / "ray")
    assert seen_on_ray.metrics_seen == seen_inline.metrics_seen
    assert in_order(seen_on_ray.events_seen) == in_order(seen_inline.events_seen)
    assert on_ray == inline


@pytest.mark.slow
def test_cut_and_resumed_on_ray_equals_inline_never_cut(tmp_path, ray_session):
    uncut = api.train(tiny("dqn", actors=2), seed=5, run_dir=tmp_path / "uncut")
    cut = tiny("dqn", actors=2, placement="ray", lockstep=True)
    api.train(cut, seed=5, run_dir=tmp_path / "cut", callbacks=stop_at(167))
    assert states(api.resume(tmp_path / "cut")) == states(uncut)


def test_cut_and_resumed_in_lockstep_equals_inline_never_cut(tmp_path):
    changes = {"actors": 2, "actor.envs": 4}
    uncut = api.train(tiny("dqn", **changes), seed=5, run_dir=tmp_path / "uncut")
    api.train(tiny("dqn", **changes, **LOCKSTEP), seed=5, run_dir=tmp_path / "cut", callbacks=stop_at(167))
    assert states(api.resume(tmp_path / "cut")) == states(uncut)


def test_a_target_stops_lockstep_where_it_stops_inline(tmp_path):
    easy = {"env_steps": 2000, "evaluation.target": 1.0, "evaluation.in_a_row": 1}
    inline = api.train(tiny("dqn", **easy), seed=5, run_dir=tmp_path / "inline")
    lockstep = api.train(tiny("dqn", **easy, **LOCKSTEP), seed=5, run_dir=tmp_path / "lockstep")
    assert lockstep.summary["stopped_by"] == "target"
    assert states(lockstep) == states(inline)


@pytest.mark.parametrize(
    "role", ["actor-0", pytest.param("replay-0", marks=SLOW), pytest.param("learner-0", marks=SLOW)]
)
def test_a_death_in_lockstep_is_survived_and_said_to_change_the_numbers(role, tmp_path, monkeypatch):
    monkeypatch.setenv("QFLEET_FAIL", f"{role}/worker.step:kill@10")
    run = api.train(tiny("dqn", **LOCKSTEP), run_dir=tmp_path / "run")
    assert run.summary["env_steps"] >= 240
    told = [event for event in read_jsonl(run.dir / "events.jsonl") if event.get("kind") == "lockstep"]
    assert [event["text"].split()[0] for event in told] == [role]
    assert "not those of an inline" in told[0]["text"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inference.kind": "served"}, "lockstep needs inference.kind 'local'"),
        ({"actor.groups": 2}, "lockstep needs actor.groups 1, not 2"),
        ({"learners": 2}, "lockstep needs one learner, not 2"),
    ],
)
def test_what_cannot_be_in_lockstep_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        tiny("dqn", **{**LOCKSTEP, **changes})


def test_inline_is_in_lockstep_anyway():
    assert tiny("dqn", lockstep=True, **{"actor.groups": 2}).in_turns
    assert tiny("dqn", **LOCKSTEP).in_turns
    assert not tiny("dqn", placement="processes").in_turns
