"""An environment with observations of some size, of which everything that carries them takes its part."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class WideEnv(gym.Env):  # type: ignore[type-arg]
    """Shows noise for twenty steps."""

    observation_space = gym.spaces.Box(0, 255, (4096,), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._shown(), float(action), self._step == 20, False, {}

    def _shown(self) -> Any:
        return self.np_random.integers(0, 256, 4096, np.uint8)


gym.register("Wide-v0", entry_point=WideEnv)
