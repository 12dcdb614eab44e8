"""Epochs: whoever was stopped while another took the run over changes nothing any more, whenever it was stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qfleet.core import failpoints
from qfleet.core.chunks import Chunk
from qfleet.core.errors import Superseded
from qfleet.runtime import checkpoint
from qfleet.runtime.epochs import Epoch

POINTS = ["before_chunk", "in_chunk", "before_manifest", "before_rename", "before_removal"]


def save(epoch: Epoch, step: int, text: str) -> Path:
    state = {"pages": [Chunk(lambda: {"text": f"{text} {step}", "noise": np.arange(3)})], "step": step}
    partial = checkpoint.begin(epoch, step)
    return checkpoint.save(epoch, partial, lambda: checkpoint.write_state(partial, "diary-0", state), {}, keep=2)


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def stopped(work: Callable[[], object], says: Path) -> int:
    """Do work in a process of its own until it stops itself; `says` gets what it ends with. Returns its number."""
    child = os.fork()
    if child == 0:
        try:
            work()
            says.write_text("done")
        except BaseException as error:
            says.write_text(f"{type(error).__name__}: {error}")
        os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    return child


@pytest.mark.parametrize("point", POINTS)
def test_one_that_stopped_at_any_moment_of_a_save_changes_nothing_after_a_takeover(point: str, tmp_path: Path) -> None:
    root, says = tmp_path / "run" / "checkpoints", tmp_path / "says"

    def first() -> None:
        failpoints.arm(f"checkpoint.{point}:stop@4", "diary-0")
        epoch = Epoch.begin(root)
        for step in (10, 20, 30, 40, 50):
            save(epoch, step, "first")

    child = stopped(first, says)
    try:
        later = Epoch.begin(root)
        for step in (35, 45):
            save(later, step, "later")
        before = tree(root)
    finally:
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, 0)
    assert says.read_text().startswith("Superseded: ")
    assert f"{tmp_path / 'run'}: the run was taken over by process {os.getpid()} on " in says.read_text()
    assert tree(root) == before
    for path in checkpoint.complete(root):
        checkpoint.verify(path)
    assert checkpoint.newest_good(root).manifest["epoch"] == 2


def test_a_late_resume_does_not_set_newer_checkpoints_aside(tmp_path: Path) -> None:
    save(Epoch.begin(tmp_path), 10, "first")
    late = Epoch.begin(tmp_path)
    found = checkpoint.newest_good(tmp_path)
    save(Epoch.begin(tmp_path), 20, "later")
    with pytest.raises(Superseded):
        checkpoint.set_aside(found, late)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["000000000010", "000000000020"]


def test_of_many_that_begin_at_once_one_stays(tmp_path: Path) -> None:
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                epoch = Epoch.begin(tmp_path / "checkpoints")
                (tmp_path / f"{number}").write_text(epoch.name)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    epochs = [Epoch(tmp_path / "checkpoints", (tmp_path / f"{number}").read_text()) for number in range(8)]
    *others, last = sorted(epochs, key=lambda epoch: epoch.name)
    last.require()
    for other in others:
        with pytest.raises(Superseded, match="taken over by process"):
            other.require()


def test_a_deleted_directory_does_not_end_an_epoch(tmp_path: Path) -> None:
    epoch = Epoch.begin(tmp_path / "run" / "checkpoints")
    save(epoch, 10, "first")
    shutil.rmtree(tmp_path / "run")
    assert checkpoint.newest_good(save(epoch, 20, "first").parent).manifest["epoch"] == 1


def test_what_a_killed_epoch_left_goes_with_the_next(tmp_path: Path) -> None:
    killed = Epoch.begin(tmp_path)
    (killed.folder / "000000000010").mkdir()
    (killed.folder / "000000000010" / "half.safetensors").write_bytes(b"x")
    save(Epoch.begin(tmp_path), 10, "next")
    *rest, folder = sorted(tmp_path.iterdir(), key=lambda path: path.name.startswith(".epoch-000002"))
    assert {path.name for path in rest} == {"000000000010", "chunks"}
    assert [path.name for path in folder.iterdir()] == ["owner"]


def test_what_could_not_be_removed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told that this would be so, and never looked at again."""
    epoch = Epoch.begin(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", lambda *_, **__: None)
        epoch.discard(tmp_path / "one")
        assert epoch.sweep() == ["one"]
    epoch.discard(tmp_path / "two")
    assert epoch.sweep() == []
