"""Name the number that you see: the simplest task a learner can get wrong."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Identity(gymnasium.Env[Any, Any]):
    """Every step shows a random number; naming it is rewarded with 1. The best return is `length`."""

    metadata = {"render_modes": ["ansi"], "render_fps": 8}  # noqa: RUF012  (Gymnasium's own declaration)

    def __init__(self, size: int = 4, length: int = 10, one_hot: bool = False, render_mode: str | None = None) -> None:
        self.action_space = spaces.Discrete(size)
        self.observation_space = spaces.Box(0.0, 1.0, (size,)) if one_hot else spaces.Discrete(size)
        self.render_mode = render_mode
        self._size, self._length, self._one_hot = size, length, one_hot
        self._number, self._steps = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._steps = 0
        self._number = int(self.np_random.integers(self._size))
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Name a number."""
        reward = float(action == self._number)
        self._steps += 1
        self._number = int(self.np_random.integers(self._size))
        return self._observe(), reward, self._steps >= self._length, False, {}

    def render(self) -> str:
        """Return the number as text."""
        return str(self._number)

    def _observe(self) -> Any:
        return np.eye(self._size, dtype=np.float32)[self._number] if self._one_hot else self._number
