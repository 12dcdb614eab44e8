"""The environments of an actor that wait for an action, and which of them rest because the balancer wants it so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qfleet.core.types import Bools, Ints

Doubles = NDArray[np.float64]

_SLOW = 3.0
"""An environment is slow when its step takes so many times as long as those of the fastest quarter."""


class Waiting:
    """Parts of E environments in the order in which they are to be acted for.

    Those that rest are kept aside: nothing is done to them, and their episodes go on later where they are.
    """

    def __init__(self, units: Sequence[Ints], parts: Sequence[Ints]) -> None:
        """Begin with all in line, in `parts`; the environments of a unit can only rest together."""
        self._units = units
        self._resting: Bools = np.zeros(sum(len(unit) for unit in units), bool)
        self.begin(parts)

    def begin(self, parts: Sequence[Ints]) -> None:
        """Let `parts` be all that waits."""
        self._line: deque[Ints] = deque()
        self._aside: list[Ints] = []
        for envs in parts:
            self.join(envs)

    def __len__(self) -> int:
        """Return how many parts are to be acted for."""
        return len(self._line)

    @property
    def awake(self) -> Bools:
        """Which environments [E] do not rest."""
        return ~self._resting

    def join(self, envs: Ints) -> None:
        """Let environments `envs` [K] wait."""
        if not self._resting.any():
            self._line.append(envs)
            return
        rest = self._resting[envs]
        for part, queue in ((envs[~rest], self._line), (envs[rest], self._aside)):
            if len(part):
                queue.append(part)

    def pop(self) -> Ints:
        """Return the next part to be acted for."""
        return self._line.popleft()

    def order(self, wanted: int, seconds: Doubles, given_up: Sequence[int] = ()) -> None:
        """Let at most `wanted` environments stay awake, but one unit unless it is 0.

        Whoever is awake stays so before one that rests, and of both the one whose step takes fewer `seconds` [E]. Those
        that are `given_up` count as awake if another one is: to let them rest would relieve nobody.
        """
        by_choice = sorted(self._units, key=lambda unit: (bool(self._resting[unit].any()), float(seconds[unit].max())))
        there = self._there(given_up)
        living = [unit for unit in by_choice if there[unit].any()]
        by_choice = [*living[:1], *(unit for unit in by_choice if not there[unit].any()), *living[1:]]
        self._resting[:] = True
        awake = 0
        for unit in by_choice:
            if awake + len(unit) <= wanted or (wanted > 0 and awake == 0):
                self._resting[unit] = False
                awake += len(unit)
        self.begin([*self._line, *self._aside])

    def load(self, seconds: Doubles, given_up: Sequence[int] = ()) -> dict[str, float]:
        """Return what the balancer goes by: how many environments act, rest only together, and are slow.

        Of those that are slow also which is the first, how long its step takes, and how long that of usual ones does.
        Those that are given up do not act: nobody is to be held to what they would have done.
        """
        acting = np.flatnonzero(self.awake & self._there(given_up))
        known = acting[seconds[acting] > 0]
        # By Hazen's rule, so that of two environments one can be slow.
        usual = float(np.quantile(seconds[known], 0.25, method="hazen")) if len(known) else 0.0
        slow = known[seconds[known] > _SLOW * usual]
        together = max(len(unit) for unit in self._units)
        load = {"acting_envs": len(acting), "envs_together": together, "slow_envs": len(slow)}
        which = {"slow_env": slow[0], "slow_s": seconds[slow[0]], "usual_s": usual} if len(slow) else {}
        return {name: float(value) for name, value in {**load, **which}.items()}

    def _there(self, given_up: Sequence[int]) -> Bools:
        """Return which environments [E] are not given up."""
        there = np.ones(len(self._resting), bool)
        there[list(given_up)] = False
        return there
