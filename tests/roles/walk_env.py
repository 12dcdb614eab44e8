"""An environment that says in every observation which episode it is in and where."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env[Any, Any]):
    """Observes (a number drawn for the episode, step); episodes have 7 steps."""

    observation_space = spaces.Box(0, 2**62, (2,), np.int64)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._tag, self._step = int(self.np_random.integers(2**40)), 0
        return np.array([self._tag, self._step]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return np.array([self._tag, self._step]), 1.0, self._step == 7, False, {}
