"""An environment that fails as planned, and says in every observation which episode it is in and where."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from qfleet.envs.gym import layout_of
from qfleet.envs.reward import AS_IT_IS
from qfleet.envs.worker import Maker
from qfleet.envs.workers import WorkersEnv

LENGTH = 7
"""Steps of an episode."""


def raise_error() -> None:
    raise ZeroDivisionError("the robot fell over")


def start_child_and_die() -> None:
    subprocess.Popen(["sleep", "60"])
    os.kill(os.getpid(), signal.SIGKILL)


FAILURES = {
    "exception": raise_error,
    "exit": lambda: sys.exit(3),
    "hard exit": lambda: os._exit(4),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(60),
    "deaf hang": lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(60)),
    "child": start_child_and_die,
}


class Fragile(gymnasium.Env[Any, Any]):
    """Observes (a number drawn from the episode's seed, step); fails at the step calls that its plan names.

    The plan is a line of `folder/plan` for each failure: environment, call, kind. Calls are counted over all lives.
    """

    def __init__(self, index: int, folder: Path) -> None:
        self.observation_space = spaces.Box(0, 2**62, (2,), np.int64)
        self.action_space = spaces.Discrete(3)
        self._index, self._folder = index, folder
        self._tag, self._step = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._tag, self._step = int(self.np_random.integers(2**60)), 0
        self._fail_as_planned(f"{self._index} reset ")
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        counter = self._folder / f"calls-{self._index}"
        call = int(counter.read_text()) if counter.exists() else 0
        draft = counter.with_name(f"draft-{self._index}-{os.getpid()}")
        draft.write_text(str(call + 1))
        draft.replace(counter)  # whole, even when this process is killed or watched
        self._fail_as_planned(f"{self._index} {call} ")
        self._step += 1
        return self._observation(), float(action), self._step == LENGTH, False, {}

    def _fail_as_planned(self, moment: str) -> None:
        for line in (self._folder / "plan").read_text().splitlines():
            if line.startswith(moment):
                FAILURES[line.removeprefix(moment)]()

    def _observation(self) -> Any:
        return np.array([self._tag, self._step], np.int64)


def plan(folder: Path, failures: dict[tuple[int, int | str], str]) -> None:
    """Say which environment fails at which of its step calls (or at every "reset"), and how; counts begin anew."""
    for counter in folder.glob("calls-*"):
        counter.unlink()
    (folder / "plan").write_text("".join(f"{index} {call} {kind}\n" for (index, call), kind in failures.items()))


def fragile_workers(
    folder: Path, count: int, step_timeout: float = 30.0, frame_stack: int = 1, judging: bool = False
) -> WorkersEnv:
    """Return environments that fail as planned."""
    if not (folder / "plan").exists():
        plan(folder, {})
    layout = layout_of(Fragile(-1, folder), "fragile")
    makers = [Maker(partial(Fragile, index, folder)) for index in range(count)]
    return WorkersEnv(makers, layout, AS_IT_IS, frame_stack, step_timeout, judging)


FRAGILE_ID = "Fragile-v0"


def register_fragile(monkeypatch: Any, folder: Path) -> None:
    """Make the environments known to Gymnasium; they share the plan and the count of environment 0."""
    plan(folder, {})
    known = {"index": 0, "folder": folder}
    spec = gymnasium.envs.registration.EnvSpec(FRAGILE_ID, entry_point="fragile_env:Fragile", kwargs=known)
    monkeypatch.setitem(gymnasium.registry, FRAGILE_ID, spec)
