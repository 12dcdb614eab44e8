"""An environment that does its process harm in given episodes, so often in all, and is harmless otherwise."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

HARM = {
    "raises": lambda: 1 // 0,
    "segfaults": lambda: ctypes.string_at(0),
    "exits": lambda: os._exit(0),
    "leaves": lambda: sys.exit(),
    "interrupts": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleeps": lambda: time.sleep(3600),
}


class FatalEnv(gym.Env):  # type: ignore[type-arg]
    """Episodes of five steps, each of which brings 1."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, harm: str = "", fatal: int = -1, times: int = 0, folder: str = "", close_s: float = 0.0) -> None:
        """Do `harm` in the third step of the episode with the seed `fatal`, so many times; `folder` has who did.

        To close takes so many seconds where that episode was played; `closing` and `closed` beside the folder tell.
        """
        self._close_s, self._played = close_s, False
        self._harm, self._seed, self._times, self._folder = harm, fatal, times, folder
        self._step, self._fatal = 0, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._fatal = 0, seed == self._seed
        self._played |= self._fatal
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        done = len(list(Path(self._folder).iterdir())) if self._fatal else 0
        if self._fatal and self._step == 3 and done < self._times:
            (Path(self._folder) / str(done)).write_text(str(os.getpid()))
            HARM[self._harm]()
        return np.full(1, self._step / 5, np.float32), 1.0, self._step == 5, False, {}

    def close(self) -> None:
        if self._close_s and self._played:
            (Path(self._folder).parent / "closing").touch()
            time.sleep(self._close_s)
            (Path(self._folder).parent / "closed").touch()


gym.register("Fatal-v0", entry_point=FatalEnv)
