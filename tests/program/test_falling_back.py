"""When a group of fused loops goes back to a checkpoint after a death, and when the run ends with it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from program_cases import short

from qfleet import session
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import RoleFailure
from qfleet.core.usercode import UserCode
from qfleet.session import Fallen, Session


class Dying(Session):
    """A run whose loops die each time, long after they began; perhaps beside a signal."""

    lives, signals, saves = 0, 0, False

    def _carry_out(self, restore: Any, whole: ExitStack) -> dict[str, Any]:
        self.lives += 1
        if self.saves and self.lives < 6:
            (self.run.checkpoints / f"{self.lives:012d}").mkdir()
        failure = RoleFailure("fused", 1, "its process was killed by SIGKILL", died=True)
        self._fallen = Fallen(failure, 0, 0.0, time.monotonic())
        self._interrupts.count = self.signals
        raise failure

    def _last_checkpoint(self) -> None:
        return None


def dying(tmp_path: Path, **survival: Any) -> Dying:
    run: Any = SimpleNamespace(checkpoints=tmp_path)
    return Dying(short(survival=survival), UserCode(), run, Callbacks(), ())


def test_a_death_beside_a_signal_is_the_end_that_was_asked_for(tmp_path: Path) -> None:
    """It ended as a failure, with another exit code."""
    run = dying(tmp_path)
    run.signals = 1
    with pytest.raises(KeyboardInterrupt), ExitStack() as whole:
        run._persist(None, whole)
    assert run.lives == 1


@pytest.mark.parametrize(("saves", "lives"), [(False, 2), (True, 7)])
def test_loops_that_never_come_to_a_checkpoint_do_not_go_back_for_ever(
    saves: bool, lives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_QUICK_S", 1e-9)
    run = dying(tmp_path, restarts=1)
    run.saves = saves
    with pytest.raises(RoleFailure, match="death 2 in a row"), ExitStack() as whole:
        run._persist(None, whole)
    assert run.lives == lives
