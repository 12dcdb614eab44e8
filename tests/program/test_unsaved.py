"""Checkpoints that cannot be written: training goes on, it is said once, and only the last one fails the run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from program_cases import fingerprint, short

import qfleet
from qfleet import Callbacks
from qfleet.core import failpoints
from qfleet.core.errors import CheckpointError, QfleetError
from qfleet.core.saving import Saving
from qfleet.observe import sinks
from qfleet.observe.sinks import Silent, read_jsonl
from qfleet.runtime import captured, checkpoint

OFTEN = {"checkpoint.every": 200}


def full(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


class Disk:
    """Lets nobody write a chunk below a run's directory, whichever process it is, until it is mended."""

    def __init__(self, run: Path) -> None:
        self._chunks = run / "checkpoints" / "chunks"
        self._aside = run / "aside"

    def break_(self) -> None:
        self._chunks.parent.mkdir(parents=True, exist_ok=True)
        if self._chunks.is_dir():
            self._chunks.rename(self._aside)
        self._chunks.symlink_to("nowhere")

    def mend(self) -> None:
        self._chunks.unlink()
        if self._aside.is_dir():
            self._aside.rename(self._chunks)


class OnNotice(Silent):
    """Calls a function at each notice of an unwritten checkpoint."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def event(self, record: Any) -> None:
        if record.get("kind") == "unsaved":
            self.act()


@pytest.fixture
def at_once(monkeypatch):
    """Lets inline runs wait for each checkpoint, so that which ones there are does not depend on the disk's speed."""
    begin = Saving.__init__

    def wait(saving: Saving, *arguments: Any) -> None:
        begin(saving, *arguments)
        saving.join()

    monkeypatch.setattr(Saving, "__init__", wait)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run / "events.jsonl") if event["event"] == name]


def unsaved(run: Path) -> list[str]:
    return [event["text"] for event in events(run, "notice") if event["kind"] == "unsaved"]


def test_two_checkpoints_without_room_are_one_notice_and_change_nothing_else(tmp_path, monkeypatch, at_once):
    genuine = captured.save_file

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if metrics["env_steps"] == 240:
            monkeypatch.setattr(captured, "save_file", full)
        elif metrics["env_steps"] == 640:
            monkeypatch.setattr(captured, "save_file", genuine)  # undo() would take back the waiting of at_once, too

    run = qfleet.train(short(**OFTEN), seed=5, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=on_step))
    assert [event["env_steps"] for event in events(run.dir, "checkpoint")] == [208, 800, 1008, 1200]
    (text,) = unsaved(run.dir)
    assert "No space left on device" in text
    assert "training goes on" in text
    (again,) = (event["text"] for event in events(run.dir, "notice") if event["kind"] == "saved")
    assert re.fullmatch(r"checkpoints can be written again, \d+\.\d s after they could not", again)
    uncut = qfleet.train(short(**OFTEN), seed=5, run_dir=tmp_path / "uncut")
    assert fingerprint(run) == fingerprint(uncut)


def test_the_next_try_waits_for_the_next_period(tmp_path, monkeypatch, at_once):
    tries = []

    def counted(*arguments: Any) -> None:
        tries.append(arguments)
        full()

    monkeypatch.setattr(captured, "save_file", counted)
    with pytest.raises(CheckpointError):
        qfleet.train(short(**{"checkpoint.every": 500, "checkpoint.every_s": 3600.0}), run_dir=tmp_path / "run")
    assert len(tries) == 3, "at 500, at 1000, and at the end"
    tries.clear()
    with pytest.raises(CheckpointError):
        qfleet.train(short(**{"checkpoint.every": 10**6, "checkpoint.every_s": 0.4}), run_dir=tmp_path / "timed")
    assert len(tries) < 30, "the time counts from the last try"


def test_roles_in_processes_train_on_when_their_state_cannot_be_written(tmp_path):
    disk = Disk(tmp_path / "run")
    made: list[int] = []

    def on_checkpoint(metrics: dict[str, Any], stop: Any) -> None:
        made.append(metrics["env_steps"])
        if len(made) == 1:
            disk.break_()
        else:
            stop()

    run = qfleet.train(
        short(env_steps=10**6, placement="processes", actors=1, **{"checkpoint.every": 500}),
        run_dir=tmp_path / "run",
        callbacks=Callbacks(on_checkpoint=on_checkpoint),
        sinks=[OnNotice(disk.mend)],
    )
    assert len(unsaved(run.dir)) == 1
    assert "chunks" in unsaved(run.dir)[0]
    assert events(run.dir, "restart") == [], "nobody had to die of it"
    assert checkpoint.newest_good(run.dir / "checkpoints").manifest["env_steps"] == run.summary["env_steps"] > made[0]
    resumed = qfleet.resume(run.dir, env_steps=run.summary["env_steps"] + 200)
    assert resumed.summary["stopped_by"] == "budget"


@pytest.mark.parametrize("placement", ["inline", "processes"])
def test_the_last_checkpoint_fails_the_run_and_the_last_good_one_stays(placement, tmp_path):
    disk = Disk(tmp_path / "run")

    def on_checkpoint(metrics: dict[str, Any], stop: Any) -> None:
        disk.break_()

    with pytest.raises(CheckpointError, match=r"chunks.*cannot be written .*is there room on the disk"):
        qfleet.train(
            short(env_steps=4000, placement=placement, actors=1, **{"checkpoint.every": 1000}),
            run_dir=tmp_path / "run",
            callbacks=Callbacks(on_checkpoint=on_checkpoint),
        )
    disk.mend()
    assert len(unsaved(tmp_path / "run")) == 1
    good = checkpoint.newest_good(tmp_path / "run" / "checkpoints").manifest["env_steps"]
    assert 1000 <= good < 4000
    assert qfleet.resume(tmp_path / "run").summary["stopped_by"] == "budget"


def test_a_model_that_cannot_be_written_is_tried_again_too(tmp_path, monkeypatch):
    from qfleet import session

    real = session.save_model
    monkeypatch.setattr(session, "save_model", full)
    mend = OnNotice(lambda: monkeypatch.setattr(session, "save_model", real))
    settings = {"checkpoint.every": 600, "evaluation.every": 500}
    run = qfleet.train(short(**settings), run_dir=tmp_path / "run", sinks=[mend])
    assert len(unsaved(run.dir)) == 1
    assert (run.dir / "model" / "model.json").is_file()


def test_a_deleted_directory_is_made_again_with_all_that_a_resume_needs(tmp_path):
    def on_checkpoint(metrics: dict[str, Any], stop: Any) -> None:
        if metrics["env_steps"] < 500:
            shutil.rmtree(tmp_path / "run")

    experiment = short(**{"checkpoint.every": 450})
    run = qfleet.train(experiment, run_dir=tmp_path / "run", callbacks=Callbacks(on_checkpoint=on_checkpoint))
    assert json.loads((run.dir / "summary.json").read_text())["env_steps"] == 1200
    assert qfleet.resume(run.dir, env_steps=1408).summary["env_steps"] == 1408


TOLD = ("unsaved", "unwritten", "unremoved")


class Screen(Silent):
    """Remembers the kinds and texts of notices."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def event(self, record: Any) -> None:
        if record["event"] == "notice" and record["kind"] in (*TOLD, "written"):
            self.told.append((record["kind"], record["text"]))


SITES = {
    "checkpoint.state": ["unsaved"],
    "checkpoint.before_chunk": ["unsaved"],
    "checkpoint.in_chunk": ["unsaved"],
    "checkpoint.before_manifest": ["unsaved"],
    "checkpoint.before_rename": ["unsaved"],
    "checkpoint.before_removal": ["unremoved"],
    "model.write": ["unsaved"],
    "metrics.write": ["unwritten", "written"],
    "events.write": ["unwritten", "written"],
    "tensorboard.write": ["unwritten"],
}
"""Where a run writes while it goes on, and what a full disk there has it tell."""


@pytest.mark.parametrize("site", SITES)
def test_a_full_disk_anywhere_does_not_end_a_run_and_is_told(site, tmp_path, monkeypatch, at_once):
    monkeypatch.setenv("QFLEET_FAIL", f"{site}:full@2")
    screen = Screen()
    changes = {"checkpoint.every": 200, "track.every_s": 0.02, "track.tensorboard": site == "tensorboard.write"}
    run = qfleet.train(short(env_steps=900, **changes), run_dir=tmp_path / "run", sinks=[screen])
    assert [kind for kind, _ in screen.told] == SITES[site]
    assert all("No space left on device" in text for kind, text in screen.told if kind != "written")
    assert run.summary["stopped_by"] == "budget"
    assert checkpoint.newest_good(run.dir / "checkpoints").manifest["env_steps"] == run.summary["env_steps"]
    in_file = [event["kind"] for event in events(run.dir, "notice") if event["kind"] in TOLD]
    assert in_file == [kind for kind in SITES[site] if kind != "written"], "what was told is in the file, too"
    steps = [record["env_steps"] for record in read_jsonl(run.dir / "metrics.jsonl")]
    assert steps == sorted(steps)
    assert not list(run.dir.rglob("*.partial")) + list((run.dir / "checkpoints").glob(".epoch-*/[0-9]*"))


@pytest.mark.parametrize("how", ["rename", "rmtree"])
def test_checkpoints_that_cannot_be_removed_are_told_once_as_long_as_that_lasts(how, tmp_path, request, at_once):
    """Nothing was said at all, and the disk filled up unseen."""
    rename, disk = os.rename, pytest.MonkeyPatch()
    request.addfinalizer(disk.undo)

    def stuck(source: Any, target: Any) -> None:
        if Path(target).name.startswith("leaving-"):
            raise OSError(30, "Read-only file system", str(source))
        rename(source, target)

    def on_checkpoint(metrics: dict[str, Any], stop: Any) -> None:
        made.append(metrics["env_steps"])
        if len(made) in (2, 6):
            target, broken = {"rename": ("os.rename", stuck), "rmtree": ("shutil.rmtree", lambda *_, **__: None)}[how]
            disk.setattr(f"qfleet.runtime.epochs.{target}", broken)
        elif len(made) == 4:
            disk.undo()

    made: list[int] = []
    experiment = short(env_steps=1400, **{"checkpoint.every": 150, "checkpoint.keep": 1})
    callbacks = Callbacks(on_checkpoint=on_checkpoint)
    run = qfleet.train(experiment, run_dir=tmp_path / "run", callbacks=callbacks)
    texts = [event["text"] for event in events(run.dir, "notice") if event["kind"] == "unremoved"]
    assert len(made) > 8
    assert len(texts) == 2, "once each time that it begins"
    assert all("could not be removed" in text and str(run.dir / "checkpoints") in text for text in texts)


@pytest.mark.parametrize("site", ["write.config", "write.summary"])
def test_a_full_disk_before_and_after_training_is_one_error_that_says_so(site, tmp_path, monkeypatch):
    monkeypatch.setenv("QFLEET_FAIL", f"{site}:full@1")
    failpoints.arm(f"{site}:full@1", "inline")
    with pytest.raises(QfleetError, match=r"run/\w+\.\w+: cannot be written \(No space left on device\)"):
        qfleet.train(short(env_steps=300), run_dir=tmp_path / "run")
    failpoints.arm("", "inline")
    monkeypatch.delenv("QFLEET_FAIL")
    if site == "write.summary":
        assert qfleet.resume(tmp_path / "run").summary["env_steps"] >= 300


def test_lines_that_had_no_room_are_written_when_there_is_some(tmp_path, monkeypatch):
    disk = [10**9, 10**9]

    def append(file: Any, line: bytes) -> int:
        room = disk.pop(0) if disk else 0
        return real(file, line[:room])

    class File(FileIO):
        def write(self, line: Any) -> int:
            return append(self, line)

    real = FileIO.write
    lines = sinks.Lines(tmp_path / "events.jsonl")
    lines._file = File(tmp_path / "events.jsonl", "ab+")
    for number in range(4):
        lines.add(f"{number}\n".encode() * 3)
        with contextlib.suppress(QfleetError):
            lines.write()
        if number == 2:
            disk.append(4)
    assert (tmp_path / "events.jsonl").read_text() == "0\n0\n0\n1\n1\n1\n", "nothing torn"
    disk += [10**9] * 3
    lines.add(b"4\n")
    lines.write()
    assert (tmp_path / "events.jsonl").read_text() == "".join(f"{n}\n" * (1 if n == 4 else 3) for n in range(5))


def test_a_full_disk_is_told_although_a_last_line_fits(tmp_path, monkeypatch):
    class Full:
        f_blocks, f_bavail, f_frsize = 100, 1, 4096

    sink = sinks.JsonlSink(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(QfleetError, match=r"the disk of .* is full"):
        sink.event({"event": "x"})
    monkeypatch.undo()
    sink.event({"event": "y"})
    assert [record["event"] for record in read_jsonl(tmp_path / "events.jsonl")] == ["x", "y"]
