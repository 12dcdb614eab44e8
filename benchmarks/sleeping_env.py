"""An environment that costs no core: it sleeps in every step, so that many actors fit a small machine."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

STEP_S = 0.02
_EPISODE = 20


class Sleeping(gymnasium.Env[Any, Any]):
    """Shows its number of steps and ends after some."""

    observation_space = spaces.Box(0, _EPISODE, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleep."""
        time.sleep(STEP_S)
        self._steps += 1
        return np.full(4, self._steps, np.float32), 1.0, self._steps == _EPISODE, False, {}


gymnasium.register("Sleeping-v0", Sleeping)
