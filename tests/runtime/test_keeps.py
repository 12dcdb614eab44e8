"""What a role leaves to its next life: arrays, and a state that is the old one or the new one, never a mixture."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core import failpoints
from qfleet.core.errors import ConfigError
from qfleet.runtime import memory
from qfleet.runtime.framing import Frame
from qfleet.runtime.graph import Graph
from qfleet.runtime.keeps import FileKeep, LocalKeep, create_keep


@pytest.fixture(autouse=True)
def nothing_armed() -> Iterator[None]:
    yield
    failpoints.arm("", "test")


def lives(folder: Path) -> Iterator[FileKeep]:
    stem = folder / "keep:role"
    create_keep(stem)
    life = 0
    while True:
        yield FileKeep(stem, life, "replay.capacity")
        life += 1


def test_later_life_finds_arrays_and_the_last_commit(tmp_path: Path) -> None:
    keeps = lives(tmp_path)
    first = next(keeps)
    assert (first.life, first.committed()) == (0, None)
    frames, empty = first.array("frames/one", (3, 2), np.float32), first.array("empty", (0, 4), np.int64)
    assert (frames == 0).all()
    assert empty.shape == (0, 4)
    frames[1] = 5
    first.commit({"number": 1, "rows": np.arange(3)})
    second = next(keeps)
    np.testing.assert_array_equal(second.array("frames/one", (3, 2), np.float32), [[0, 0], [5, 5], [0, 0]])
    assert second.life == 1
    state = second.committed()
    assert state["number"] == 1
    np.testing.assert_array_equal(state["rows"], [0, 1, 2])


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(["", "in", "before_commit", "after_commit"])), max_size=20)
)
@settings(deadline=None, max_examples=60)
def test_commit_that_dies_leaves_the_old_state_or_the_new_one(commits: list[tuple[int, str]]) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        keeps, expected = lives(Path(name)), None
        keep = next(keeps)
        for size, death in commits:
            state = np.full(size, size)
            if death == "in":
                patch.setattr(Frame, "write", tear)
            elif death:
                failpoints.arm(f"keep.{death}:raise@1", "test")
            try:
                keep.commit(state)
            except RuntimeError:
                keep = next(keeps)
            patch.undo()
            failpoints.arm("", "test")
            expected = state if death in ("", "after_commit") else expected
            found = keep.committed()
            assert (found is None) == (expected is None)
            if expected is not None:
                np.testing.assert_array_equal(found, expected)


def tear(frame: Frame, buffer: np.ndarray) -> None:
    """Write half of a frame and die."""
    buffer[: frame.nbytes // 2] = 7
    raise RuntimeError("torn")


def test_array_whose_making_was_cut_short_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeps = lives(tmp_path)

    def die(old: Path, new: Path) -> None:
        raise KeyboardInterrupt

    keep = next(keeps)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            keep.array("rows", (5,), np.int64)
    assert (next(keeps).array("rows", (5,), np.int64) == 0).all()


def test_array_of_another_size_is_refused(tmp_path: Path) -> None:
    keep = next(lives(tmp_path))
    keep.array("rows", (5,), np.int64)
    with pytest.raises(ValueError, match="the kept array 'rows' has 40 bytes, not the 48"):
        keep.array("rows", (6,), np.int64)


def test_lack_of_room_is_told_with_the_arithmetic_and_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = next(lives(tmp_path))

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory.os, "posix_fallocate", full)
    expected = r"'frames', \[1000, 84, 84\] of uint8, takes 7.1 MB and .* MB are free .* or lower replay.capacity"
    with pytest.raises(ConfigError, match=expected):
        keep.array("frames", (1000, 84, 84), np.uint8)
    monkeypatch.undo()
    assert keep.array("frames", (10, 84, 84), np.uint8).sum() == 0, "nothing was left of the attempt"


def test_keep_of_one_process_holds_what_it_was_given() -> None:
    keep = LocalKeep()
    keep.array("rows", (3,), np.int64)[1] = 4
    assert list(keep.array("rows", (3,), np.int64)) == [0, 4, 0]
    assert (keep.life, keep.committed()) == (0, None)
    keep.commit({"a": 1})
    assert keep.committed() == {"a": 1}


def test_keep_is_drawn_for_one_role() -> None:
    graph = Graph()
    graph.keep("replay-0")
    with pytest.raises(ValueError, match="'replay-0' is drawn twice"):
        graph.keep("replay-0")
