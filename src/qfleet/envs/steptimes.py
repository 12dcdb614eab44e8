"""How long a step of each environment takes, at the least of a few samples: what a busy machine or a reset adds to one
of them says nothing of the environment."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from qfleet.core.types import Ints

APART_S = 0.2
"""Samples of an environment are that far apart at least, so that they are not all of the same moment."""
_KEPT = 5


class StepTimes:
    """The newest samples of E environments."""

    def __init__(self, count: int) -> None:
        self._samples = np.zeros((count, _KEPT))
        self._taken = np.zeros(count, np.int64)
        self._due = np.full(count, -np.inf)

    def due(self, env: int) -> bool:
        """Return whether the next step of an environment will be a sample."""
        return bool(time.perf_counter() >= self._due[env])

    def note(self, envs: Ints, seconds: float | NDArray[np.float64]) -> None:
        """Take how long the last step of environments `envs` [K] took, of those that are due."""
        now = time.perf_counter()
        due = now >= self._due[envs]
        if not due.any():
            return
        chosen, took = envs[due], np.broadcast_to(seconds, envs.shape)[due]
        first = self._taken[chosen] == 0
        self._samples[chosen, self._taken[chosen] % _KEPT] = took
        self._samples[chosen[first]] = took[first, None]
        self._taken[chosen] += 1
        self._due[chosen] = now + APART_S

    @property
    def seconds(self) -> NDArray[np.float64]:
        """The least of each environment's samples [E]; 0 before the first."""
        least: NDArray[np.float64] = self._samples.min(axis=1)
        return least
