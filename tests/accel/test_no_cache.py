"""Users without a home, and machines without a directory to write to: nothing is kept, and everything works."""

from __future__ import annotations

import os
from pathlib import Path

import numba.core.caching as caching
import pytest

from qfleet.accel import cache
from qfleet.accel.choices import _why_not_kept
from qfleet.accel.compiled import FLOATS, compiled
from qfleet.accel.table import Settings
from qfleet.core import compiling


def test_without_a_home_choices_are_kept_among_the_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("QFLEET_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache.read() == ((), "")
    cache.store({"work": 1}, Settings(), "measured")
    assert cache.cache_path() == tmp_path / f"qfleet-{os.getuid()}" / "choices.json"
    entry, complaint = cache.find({"work": 1})
    assert (entry is not None, complaint) == (True, "")


def test_without_a_directory_to_write_to_loops_are_compiled_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(self: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(compiling, "_not_kept", set())
    for locator in caching.CacheImpl._locator_classes:
        monkeypatch.setattr(locator, "ensure_cache_path", read_only)

    @compiled(FLOATS, result="float64")
    def first(values):
        return values[0] * 2.0

    import numpy as np

    assert first(np.full(1, 21.0, np.float32)) == 42
    assert "NUMBA_CACHE_DIR" in _why_not_kept()


def test_what_cannot_be_compiled_still_says_so() -> None:
    with pytest.raises(Exception, match="no_such_name"):

        @compiled(FLOATS, result="float64")
        def wrong(values):
            return no_such_name(values)  # noqa: F821
