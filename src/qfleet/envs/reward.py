"""Turns an environment's rewards into those for learning; scores are always counted from the raw ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qfleet.core.types import Floats


@dataclass(frozen=True)
class RewardShaping:
    """First clipped to [-clip, clip], then multiplied by scale."""

    scale: float = 1.0
    clip: float | None = None

    def apply(self, reward: NDArray[np.float64]) -> Floats:
        """Return the rewards [E] for learning, a fresh float32 array."""
        if self.clip is not None:
            reward = np.clip(reward, -self.clip, self.clip)
        if self.scale != 1.0:
            reward = reward * self.scale
        return reward.astype(np.float32)


AS_IT_IS = RewardShaping()
"""Learn from, or evaluate with, the environment's own rewards."""
