"""Checkpoints are written beside training: it goes on meanwhile, and a cut at any moment leaves the one before."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from program_cases import fingerprint, short

import qfleet
from qfleet import Callbacks
from qfleet.core.errors import QfleetError
from qfleet.experiment import with_changes
from qfleet.observe.sinks import read_jsonl
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.runtime import captured, checkpoint
from qfleet.runtime.supervisor import SupervisedPlacement


class Gate:
    """Holds up whoever writes a checkpoint of an inline run, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.waiting = threading.Event(), threading.Event()
        self._write = captured.save_file
        monkeypatch.setattr(captured, "save_file", self._wait)

    def _wait(self, *arguments: Any) -> None:
        self.waiting.set()
        assert self.opened.wait(60), "nobody opened the gate"
        self._write(*arguments)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run / "events.jsonl") if event["event"] == name]


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if metrics["env_steps"] >= 800:
            gate.opened.set()

    run = qfleet.train(
        short(**{"checkpoint.every": 200}), seed=5, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=on_step)
    )
    steps = [event["env_steps"] for event in events(run.dir, "checkpoint")]
    assert steps[0] == 208
    assert all(step == 208 or step >= 800 for step in steps), "none is begun while one is being written"
    assert steps[-1] == 1200
    (late,) = [event["text"] for event in events(run.dir, "notice") if event["kind"] == "late"]
    assert "that of step 208 is still being written" in late
    uncut = qfleet.train(short(), seed=5, run_dir=tmp_path / "uncut")
    assert fingerprint(run) == fingerprint(uncut)


@pytest.mark.usefixtures("written_at_once")
def test_never_more_is_new_than_an_end_can_soon_write(tmp_path: Path) -> None:
    """The last checkpoint had all rows since the one before, seven gigabytes of frames: SIGTERM took a minute."""
    wide = {"env.id": "wide_env:Wide-v0", "checkpoint.every": 10**6, "replay.capacity": 5000}
    seldom = {"evaluation.every": 10**6, "evaluation.max_episode_steps": 20}
    small = {**wide, **seldom, "checkpoint.keep": 99, "network.input.scale": [1 / 255], "checkpoint.unsaved_mb": 1.0}
    run = qfleet.train(short(**small), run_dir=tmp_path / "run")
    steps = [event["env_steps"] for event in events(run.dir, "checkpoint")]
    assert len(steps) > 3
    assert all(later - earlier < 1.1 * 1e6 / 4096 for earlier, later in itertools.pairwise([0, *steps]))
    sizes = [path.stat().st_size for path in (run.dir / "checkpoints" / "chunks").glob("*.safetensors")]
    assert 1200 * 4096 < sum(sizes) < 1.2 * 1200 * 4096, "each row is written about once"


def test_a_run_that_is_to_end_stands_still_while_an_earlier_checkpoint_is_still_written(tmp_path, monkeypatch):
    """It went on for as long as the disk took: 15,000 steps more than anybody asked for."""
    stopped, stood_still, pause = threading.Event(), threading.Event(), SupervisedPlacement.pause
    publish, waited = checkpoint.publish, []

    def slowly(*arguments: Any) -> Path:
        waited.append(stopped.wait(60) and stood_still.wait(20))
        return publish(*arguments)

    def paused(placement: SupervisedPlacement) -> None:
        pause(placement)
        if stopped.is_set():
            stood_still.set()

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if metrics["env_steps"] >= 1500:
            stop()
            stopped.set()

    monkeypatch.setattr(checkpoint, "publish", slowly)
    monkeypatch.setattr(SupervisedPlacement, "pause", paused)
    long = short(env_steps=100_000, placement="processes")
    qfleet.train(long, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=on_step))
    assert waited[0], "the run stood still before the earlier one was written"


def test_a_checkpoint_written_beside_training_is_of_the_moment_when_it_was_taken(tmp_path, monkeypatch):
    """The replay is so small that what is saved is evicted meanwhile."""
    small = {"checkpoint.every": 300, "checkpoint.keep": 9, "replay.capacity": 400, "replay.segment": 10}
    gate = Gate(monkeypatch)

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if metrics["env_steps"] >= 1000:
            gate.opened.set()

    run = qfleet.train(
        short("prioritised", **small), seed=5, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=on_step)
    )
    for path in checkpoint.complete(run.dir / "checkpoints")[1:]:
        for part in path.iterdir():
            part.unlink()
        path.rmdir()
    resumed = qfleet.resume(run.dir)
    uncut = qfleet.train(short("prioritised", **small), seed=5, run_dir=tmp_path / "uncut")
    assert events(run.dir, "resumed")[0]["env_steps"] < 400
    assert fingerprint(resumed) == fingerprint(uncut)


def test_a_run_that_fails_finishes_what_it_was_writing(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def fails(metrics: dict[str, Any], stop: Any) -> None:
        if metrics["env_steps"] >= 600:
            threading.Timer(0.2, gate.opened.set).start()
            raise QfleetError("enough")

    with pytest.raises(QfleetError, match="enough"):
        qfleet.train(short(), run_dir=tmp_path / "run", callbacks=Callbacks(on_step=fails))
    assert checkpoint.newest_good(tmp_path / "run" / "checkpoints").manifest["env_steps"] < 600
    assert qfleet.resume(tmp_path / "run").summary["env_steps"] == 1200


def test_a_second_signal_does_not_wait_for_what_is_being_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def interrupted(metrics: dict[str, Any], stop: Any) -> None:
        if gate.waiting.is_set():
            threading.Timer(0.2, gate.opened.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qfleet.train(short(), run_dir=tmp_path / "run", callbacks=Callbacks(on_step=interrupted))
    assert not list((tmp_path / "run" / "checkpoints").glob(".epoch-*/[0-9]*")), "nothing half written stays"


def test_all_checkpoints_of_a_run_write_its_rows_about_once(tmp_path):
    settings = {"checkpoint.every": 1000, "checkpoint.keep": 99, "replay.capacity": 20_000}
    run = qfleet.train(short(env_steps=5000, **settings), run_dir=tmp_path / "run")
    folder = run.dir / "checkpoints" / "chunks"
    assert len(events(run.dir, "checkpoint")) >= 3
    written, row_bytes = sum(path.stat().st_size for path in folder.iterdir()), 4 * 4 + 17
    assert 5000 * row_bytes < written <= 1.2 * 5000 * row_bytes


@pytest.mark.parametrize(
    "where", [pytest.param("learner-0/checkpoint.state", marks=pytest.mark.slow), "replay-0/checkpoint.in_chunk"]
)
def test_a_role_that_dies_while_it_writes_costs_no_more_than_another_try(where, tmp_path, monkeypatch):
    monkeypatch.setenv("QFLEET_FAIL", f"{where}:kill@2")
    experiment = short(env_steps=3000, placement="processes", actors=1, **{"checkpoint.every": 800})
    run = qfleet.train(experiment, run_dir=tmp_path / "run")
    (death,) = events(run.dir, "restart")
    assert death["role"] == where.split("-")[0]
    assert [event["kind"] for event in events(run.dir, "notice") if event["kind"] == "unsaved"] == []
    assert len(events(run.dir, "checkpoint")) >= 2
    found = checkpoint.newest_good(run.dir / "checkpoints")
    assert (found.manifest["env_steps"], found.skipped) == (run.summary["env_steps"], [])
    assert not list((run.dir / "checkpoints").glob(".epoch-*/[0-9]*"))


@pytest.mark.slow
def test_all_checkpoints_of_a_fused_run_write_its_rows_about_once(tmp_path):
    settings = {"topology": "fused", "checkpoint.every": 8000, "checkpoint.keep": 99, "replay.capacity": 30_000}
    chosen = with_changes(apply(preset("minatar:breakout"), "dqn"), {"actor.envs": 64, "env_steps": 40_000, **settings})
    quiet = {"evaluation.every": 10**9, "evaluation.episodes": 1, "evaluation.test_episodes": 1}
    still = {
        "learner.learning_starts": 1000,
        "learner.train_period": 2000.0,
        "evaluation.max_episode_steps": 10,
        "evaluation.target": None,
    }
    run = qfleet.train(with_changes(chosen, {**quiet, **still}), run_dir=tmp_path / "run")
    saved = checkpoint.read_state(checkpoint.complete(run.dir / "checkpoints")[-1], "fused-0")["loop"]["grid"]
    assert len(events(run.dir, "checkpoint")) >= 4
    ticks, row_bytes = int(saved["positions"][0]), 400 + 16
    written = sum(path.stat().st_size for path in (run.dir / "checkpoints" / "chunks").iterdir())
    assert ticks > 30_000 // 64, "the ring went around"
    assert 0.99 * ticks * 64 * row_bytes < written <= 1.2 * ticks * 64 * row_bytes
