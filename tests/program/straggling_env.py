"""An environment that waits in every step; in one actor, the first one waits much longer from some step on."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

STEP_S, SLOW_S = 0.004, 0.1


class StragglingEnv(gym.Env):  # type: ignore[type-arg]
    """Episodes of 50 steps, whatever is done."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    _made = 0

    def __init__(self, straggler: str, begins: int, note: str) -> None:
        """Straggle after `begins` steps if this is the process of that name, and note the time when that happens."""
        self._slow = multiprocessing.current_process().name == straggler and StragglingEnv._made == 0
        StragglingEnv._made += 1
        self._begins, self._note = begins, Path(note)
        self._steps = self._taken = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._taken += 1
        self._steps += 1
        if self._slow and self._taken == self._begins:
            self._note.write_text(str(time.time()))
        time.sleep(SLOW_S if self._slow and self._taken >= self._begins else STEP_S)
        return np.zeros(4, np.float32), 0.0, self._steps >= 50, False, {}


gym.register("Straggling-v0", entry_point=StragglingEnv)
