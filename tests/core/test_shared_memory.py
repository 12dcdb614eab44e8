"""The folder that is wished for is where everybody looks for shared memory: plans, runs, environments, the doctor."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from qfleet.cli import doctor
from qfleet.control import resources
from qfleet.core import shared_memory
from qfleet.core.errors import ConfigError, QfleetError
from qfleet.core.shared_memory import ELSEWHERE, shared_memory_root
from qfleet.envs.gym import layout_of
from qfleet.envs.slots import shared_file
from qfleet.runtime.memory import free_bytes


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system whose usual folder does not exist, and a folder that is named instead."""
    monkeypatch.setattr(shared_memory, "_USUAL", tmp_path / "none")
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv(ELSEWHERE, str(tmp_path / "shared"))
    return tmp_path / "shared"


def test_plans_and_runs_see_the_same_room_in_the_folder_that_is_named(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = {elsewhere: 123_456}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 0, rooms[path]))
    assert resources.look().shared_memory == free_bytes() == 123_456


def test_environments_in_processes_use_it_too_and_say_how_to_change_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    layout = layout_of(gymnasium.make("CartPole-v1"), "CartPole-v1")
    os.close(shared_file(layout, 2))
    monkeypatch.setattr(os, "posix_fallocate", full)
    words = rf"2 environments in processes.*free in {elsewhere}; .*--shm-size.*{ELSEWHERE}, or lower actor.envs"
    with pytest.raises(QfleetError, match=words):
        shared_file(layout, 2)


def test_the_doctor_looks_there_and_tells_of_a_folder_that_is_none(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor._shared_memory()["path"] == str(elsewhere)
    monkeypatch.setenv(ELSEWHERE, str(elsewhere / "none"))
    assert ELSEWHERE in doctor._shared_memory()["complaint"]
    (elsewhere / "file").touch(mode=0o777)
    for name in ("none", "file"):
        monkeypatch.setenv(ELSEWHERE, str(elsewhere / name))
        with pytest.raises(ConfigError, match="not a folder that can be written to"):
            shared_memory_root()


def test_without_either_it_is_the_temporary_folder(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ELSEWHERE)
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: "/tmp/of/this/test")
    assert shared_memory_root() == Path("/tmp/of/this/test")
