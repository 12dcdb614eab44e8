"""Trouble that is not qfleet's: full disks, deleted folders, closed outputs. One line says what to do."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from commands import command

from qfleet import api
from qfleet.cli.panel import Silent, make_console_sink


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written_is_named_and_is_no_internal_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "run" / "some.file"))

    monkeypatch.setattr(api.Session, "carry_out", full)
    done = command(capsys, "train", "cartpole", "--run-dir", str(tmp_path / "run"))
    assert done.code == 3
    assert f"some.file: cannot be written ({os.strerror(number)})" in done.err
    assert "qfleet resume" in done.err
    assert "internal" not in done.err


def test_a_command_is_understood_in_a_folder_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert command(capsys, "presets").code == 0


def test_without_an_output_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert isinstance(make_console_sink(quiet=False), Silent)
