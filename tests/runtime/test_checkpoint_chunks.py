"""Chunks that checkpoints share: kept as long as one needs them, gone after that, and good after any kill."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core import failpoints
from qfleet.core.chunks import Chunk
from qfleet.core.errors import CheckpointError
from qfleet.runtime import checkpoint, chunkfiles
from qfleet.runtime.epochs import Epoch


class Diary:
    """A role whose state is a list of pages, of which the newest two may still change."""

    def __init__(self) -> None:
        self.pages: list[Chunk] = []

    def write(self, text: str) -> None:
        for page in self.pages[-1:]:
            content = {"text": page.read()["text"] + "!", "noise": np.arange(3)}
            page.read, page.name = (lambda content=content: content), None
        self.pages.append(Chunk(lambda: {"text": text, "noise": np.arange(3)}))

    def save(self, root: Path, step: int, keep: int = 2) -> Path:
        state = {"pages": self.pages, "count": len(self.pages)}
        epoch = Epoch.begin(root)
        partial = checkpoint.begin(epoch, step)
        return checkpoint.save(epoch, partial, lambda: checkpoint.write_state(partial, "diary-0", state), {}, keep)


def texts(directory: Path) -> list[str]:
    checkpoint.verify(directory)
    state = checkpoint.read_state(directory, "diary-0")
    assert state["count"] == len(state["pages"])
    return [page.read()["text"] for page in state["pages"]]


def expected(step: int) -> list[str]:
    return [f"page {number}" + "!" * (number < step) for number in range(1, step + 1)]


def chunk_names(root: Path) -> set[str]:
    """Chunks that are there, each with its parity; nothing else may be."""
    names = {path.name for path in (root / chunkfiles.FOLDER).iterdir()}
    chunks = {name for name in names if name.endswith(".safetensors")}
    assert names == chunks | {name.replace("safetensors", "parity") for name in chunks}
    return chunks


def named(root: Path) -> set[str]:
    manifests = [json.loads((path / checkpoint.MANIFEST).read_text()) for path in checkpoint.complete(root)]
    return {name for manifest in manifests for name in manifest["chunks"]}


def keep_diary(root: Path, steps: int, keep: int = 2) -> None:
    diary = Diary()
    for step in range(1, steps + 1):
        diary.write(f"page {step}")
        diary.save(root, step, keep)


def test_checkpoints_share_chunks_and_the_unneeded_go(tmp_path: Path) -> None:
    keep_diary(tmp_path, 6)
    assert [texts(path) for path in checkpoint.complete(tmp_path)] == [expected(5), expected(6)]
    assert chunk_names(tmp_path) == named(tmp_path)
    assert len(named(tmp_path)) == 7, "five finished pages, two unfinished ones"


def test_what_was_written_is_not_written_again(tmp_path: Path) -> None:
    diary = Diary()
    for step in range(1, 4):
        diary.write(f"page {step}")
        diary.save(tmp_path, step)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "chunks").iterdir()}
    diary.save(tmp_path, 4)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "chunks").iterdir()}.items() <= before.items()


def test_a_chunk_whose_file_is_gone_is_written_again(tmp_path: Path) -> None:
    diary = Diary()
    for step in range(1, 4):
        diary.write(f"page {step}")
        diary.save(tmp_path, step)
    for path in (tmp_path / "chunks").iterdir():
        path.unlink()
    assert texts(diary.save(tmp_path, 4)) == expected(3)


def in_a_child(work: Callable[[], object]) -> int:
    """Do work in a process of its own; return how that ended, as `os.waitpid` says it."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


POINTS = ["before_chunk", "in_chunk", "before_manifest", "before_rename", "before_removal"]


@settings(max_examples=20, deadline=None)
@given(point=st.sampled_from(POINTS), count=st.integers(1, 12), keep=st.integers(1, 3))
def test_a_kill_at_any_moment_leaves_the_last_checkpoint_good(
    point: str, count: int, keep: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("checkpoints")

    def killed() -> None:
        failpoints.arm(f"checkpoint.{point}:kill@{count}", "diary-0")
        keep_diary(root, 6, keep)

    ended = in_a_child(killed)
    assert ended in (0, signal.SIGKILL)
    done = checkpoint.complete(root)
    if "chunk" not in point:  # each is passed once in a checkpoint
        finished = count - (0 if point == "before_removal" else 1) if ended else 6
        assert [int(path.name) for path in done][-1:] == [finished][: finished > 0]
    for path in done:
        assert texts(path) == expected(int(path.name))
    keep_diary(root, 8, keep)  # as the resumed run would
    assert all(texts(path) == expected(int(path.name[:12])) for path in checkpoint.complete(root))
    assert chunk_names(root) == named(root), "nothing half written stays"
    assert [path.name for path in root.glob(".epoch-*/*")] == ["owner"]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_chunk_that_is_gone_or_too_damaged_is_named_and_the_checkpoint_before_is_used(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("checkpoints")
    keep_diary(root, 4)
    older, newest = checkpoint.complete(root)
    own = set(checkpoint.verify(newest)["chunks"]) - set(checkpoint.verify(older)["chunks"])
    victim = root / "chunks" / data.draw(st.sampled_from(sorted(own)))
    content = bytearray(victim.read_bytes())
    damage = data.draw(st.sampled_from(["two parts", "cut", "remove", "no parity"]))
    if damage == "two parts":
        content[0] ^= 1
        content[-1] ^= 2
    elif damage == "no parity":
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1
        victim.with_suffix(".parity").unlink()
    victim.write_bytes(bytes(content[: data.draw(st.integers(0, len(content) - 1))] if damage == "cut" else content))
    if damage == "remove":
        victim.unlink()
    found = checkpoint.newest_good(root)
    assert found.directory == older
    assert str(victim) in found.skipped[0]
    assert ("missing" if damage == "remove" else "damaged") in found.skipped[0]
    checkpoint.set_aside(found, Epoch.begin(root))
    assert texts(checkpoint.newest_good(root).directory) == expected(3)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_in_a_chunk_or_its_parity_is_named_and_put_right(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("checkpoints")
    keep_diary(root, 4)
    victim = data.draw(st.sampled_from(sorted((root / "chunks").iterdir())))
    before = victim.read_bytes()
    content = bytearray(before)
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    victim.write_bytes(bytes(content))
    found = checkpoint.newest_good(root)
    assert found.skipped == []
    needed = {Path(name).stem for name in found.manifest["chunks"]}
    assert [str(victim) in line for line in found.mended] == [True] * (victim.stem in needed)
    assert (victim.read_bytes() == before) == (victim.stem in needed)
    assert texts(found.directory) == expected(4)


def test_a_full_disk_is_one_error_and_the_next_attempt_needs_no_more_than_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = Diary()
    diary.write("page 1")
    diary.save(tmp_path, 1)
    diary.write("page 2")
    real = os.replace

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match="room on the disk"):
        diary.save(tmp_path, 2)
    assert texts(checkpoint.newest_good(tmp_path).directory) == expected(1)
    monkeypatch.setattr(os, "replace", real)
    assert texts(diary.save(tmp_path, 2)) == expected(2)
    assert chunk_names(tmp_path) == named(tmp_path)


def test_nothing_is_removed_while_a_manifest_cannot_be_read(tmp_path: Path) -> None:
    diary = Diary()
    for step in range(1, 4):
        diary.write(f"page {step}")
        diary.save(tmp_path, step, keep=9)
    before = chunk_names(tmp_path)
    (checkpoint.complete(tmp_path)[0] / checkpoint.MANIFEST).write_text("{")
    diary.write("page 4")
    diary.save(tmp_path, 4, keep=9)
    assert before < chunk_names(tmp_path)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "0" * 64, 7, None])
def test_a_manifest_cannot_name_chunks_elsewhere(name: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    keep_diary(tmp_path / "root", 1)
    (newest,) = checkpoint.complete(tmp_path / "root")
    manifest = json.loads((newest / checkpoint.MANIFEST).read_text())
    del manifest["sha256"]
    manifest["chunks"] = [name]
    signed = {**manifest, "sha256": hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()}
    (newest / checkpoint.MANIFEST).write_text(json.dumps(signed, indent=1))
    with pytest.raises(CheckpointError, match="is not the name of a chunk"):
        checkpoint.verify(newest)
