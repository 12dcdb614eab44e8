"""CartPole that never comes back from its 50th step in the process of one name, and notes that in a file."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym

ROLE, NOTE = "HANGING_ENV_ROLE", "HANGING_ENV_NOTE"
"""Variables: the name of the process that hangs, and the file in which it says so."""


class HangingEnv(gym.Wrapper):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._steps = 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == 50 and multiprocessing.current_process().name == os.environ[ROLE]:
            Path(os.environ[NOTE]).touch()
            time.sleep(3600)
        return super().step(action)


gym.register("Hanging-v0", entry_point=HangingEnv)
