"""Real runs with an actor that falls behind: the balancer sees it in time, relieves it, and says what came of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from program_cases import short

import qfleet.api as api
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment
from qfleet.observe.sinks import read_jsonl
from qfleet.runtime import checkpoint


def straggling(note: Path, begins: int, **changes: Any) -> Experiment:
    """Two actors, of which the second falls behind after so many steps; nothing is learned."""
    settings = {
        "placement": "processes",
        "env.id": "straggling_env:Straggling-v0",
        "env.kwargs": {"straggler": "actor-1", "begins": begins, "note": str(note)},
        "actors": 2,
        "actor.envs": 4,
        "learner.learning_starts": 10**5,
        "replay.capacity": 2 * 10**5,
        "checkpoint.every": 10**6,
    }
    return short(env_steps=10**6, **{**settings, **changes})


class Watch:
    """Keeps the events, and ends the run after a decision of the balancer's, or so many seconds."""

    def __init__(self, until: str = "", seconds: float = 60) -> None:
        self.until, self.seconds = until, seconds
        self.ends: float | None = None
        self.found: list[dict[str, Any]] = []

    def metrics(self, record: Any) -> None: ...

    def event(self, record: Any) -> None:
        if record["event"] == "balance":
            self.found.append(dict(record))

    def close(self) -> None: ...

    def on_step(self, metrics: dict[str, Any], stop: Any) -> None:
        self.ends = self.ends or time.monotonic() + self.seconds
        if time.monotonic() > self.ends or any(event["decision"] == self.until for event in self.found):
            stop()


def watched(experiment: Experiment, run_dir: Path, until: str) -> dict[str, dict[str, Any]]:
    """Train until a decision was made; returns the first event of each kind of decision."""
    watch = Watch(until)
    api.train(experiment, run_dir=run_dir, sinks=[watch], callbacks=Callbacks(on_step=watch.on_step))
    return {event["decision"]: event for event in reversed(watch.found)}


@pytest.mark.slow  # whether a run is faster is told by the clock, which other work on the machine changes
def test_a_straggler_is_seen_within_five_seconds_relieved_and_the_run_is_faster(tmp_path):
    experiment = straggling(tmp_path / "note", begins=200, **{"actor.groups": 2})
    found = watched(experiment, tmp_path / "run", until="kept")
    began = float((tmp_path / "note").read_text())
    assert found["straggler"]["index"] == found["rest"]["index"] == 1
    assert began <= found["straggler"]["time"] <= found["rest"]["time"] <= began + 5
    assert "2 of its 4 environments rest" in found["rest"]["text"]
    assert "kept" in found, found["taken_back"]
    assert found["kept"]["before"] == found["rest"]["before"]
    assert found["kept"]["after"] > found["kept"]["before"]


@pytest.mark.slow
def test_the_slow_environment_of_a_single_actor_is_named_within_five_seconds(tmp_path):
    changes = {"actors": 1, "env.kwargs": {"straggler": "actor-0", "begins": 200, "note": str(tmp_path / "note")}}
    found = watched(straggling(tmp_path / "note", begins=200, **changes), tmp_path / "run", until="straggler")
    began = float((tmp_path / "note").read_text())
    assert began <= found["straggler"]["time"] <= began + 5
    text = found["straggler"]["text"]
    assert "its environment 0 of 4 takes" in text
    assert "--env.vectorisation async --actor.groups 2 would let the others go on without it" in text


@pytest.mark.slow
def test_a_spare_actor_takes_over_and_a_resumed_run_goes_on_so(tmp_path):
    experiment = straggling(tmp_path / "note", begins=1, spare_actors=1)
    found = watched(experiment, tmp_path / "run", until="move")
    assert "4 by actor 2" in found["move"]["text"]
    (last,) = checkpoint.complete(tmp_path / "run" / "checkpoints")
    assert checkpoint.verify(last)["standing"]["envs"] == [4, 0, 4]

    api.resume(tmp_path / "run", callbacks=Callbacks(on_step=Watch(seconds=5).on_step))
    record = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))[-1]
    assert record["actor.1.idle"] == "not needed now"
    assert record["actor.1.rate"] == 0
    assert min(record["actor.0.rate"], record["actor.2.rate"]) > 0


@pytest.mark.parametrize("changes", [{"placement": "inline"}, {"balance": "off"}, {"lockstep": True}])
def test_spare_actors_need_somebody_who_wakes_them(changes, tmp_path):
    with pytest.raises(ConfigError, match="needs a balancer to wake them"):
        straggling(tmp_path, 1, spare_actors=1, **changes)
