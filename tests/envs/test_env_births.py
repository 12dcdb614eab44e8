"""A process of environments that is killed while these are made is begun anew; one that always is, is an error."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fragile_env import Fragile, plan

from qfleet.core.errors import ConfigError, QfleetError
from qfleet.envs import GymConfig, make_env
from qfleet.envs import crew as crew_module

ITSELF, WHAT_STARTS_IT = "its own process", "the process that starts it"
WHO = pytest.mark.parametrize("who", [ITSELF, WHAT_STARTS_IT])
CONFIG = GymConfig(id="mine", vectorisation="async")


class KilledAtBirth(Fragile):
    """Has a process killed while it is made, so often."""

    def __init__(self, folder: Path, home: int, who: str, times: int) -> None:
        super().__init__(0, folder)
        if os.getpid() == home:
            return
        for number in range(times):
            try:
                (folder / f"killed-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid() if who == ITSELF else os.getppid(), signal.SIGKILL)
            signal.pause()


@WHO
def test_who_is_killed_while_it_is_made_is_begun_anew(who: str, tmp_path: Path) -> None:
    """It was a mistake in the configuration: the run ended, or a life of an actor that was begun anew."""
    plan(tmp_path, {})
    with closing(make_env(CONFIG, 2, factory=partial(KilledAtBirth, tmp_path, os.getpid(), who, 1))) as env:
        env.reset([1, 2])
        assert env.step(np.zeros(2, np.int64)).valid.all()
        assert env.incidents() == []
    assert (tmp_path / "killed-0").exists()


@WHO
def test_who_is_killed_whenever_it_is_made_is_one_error(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(tmp_path, {})
    monkeypatch.setattr(crew_module, "BACK_OFF_S", (0.0, 0.0, 0.0, 0.0))
    said, error = {
        ITSELF: ("mine, environment 0, cannot be made.*killed by SIGKILL", ConfigError),
        WHAT_STARTS_IT: ("the process that starts the environments' processes dies again and again", QfleetError),
    }[who]
    with pytest.raises(error, match=said):
        make_env(CONFIG, 1, factory=partial(KilledAtBirth, tmp_path, os.getpid(), who, 100))
