"""The exact rules of a deterministic environment with few states, and the best values that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qfleet.core.types import Bools, Ints


@dataclass(frozen=True)
class Model:
    """What each of A actions does in each of S states."""

    next_state: Ints  # [S, A]
    reward: NDArray[np.float64]  # [S, A]
    terminal: Bools  # [S, A] whether the episode ends there

    def optimal_q(self, gamma: float, tolerance: float = 1e-12) -> NDArray[np.float64]:
        """Return Q* [S, A] by value iteration, for discounts below 1."""
        q = np.zeros_like(self.reward)
        while True:
            value = np.where(self.terminal, 0.0, q.max(axis=1)[self.next_state])
            updated = self.reward + gamma * value
            if np.abs(updated - q).max() < tolerance:
                return updated
            q = updated
