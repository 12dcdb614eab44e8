"""Whose gradient a parameter server may take next, so that none is older and no worker further ahead than allowed.

The books are kept in arrays that can outlive the server's process: entries are changed in an order that leaves them
right whenever it dies, and what was being taken is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError
from qfleet.core.role import State
from qfleet.core.types import Ints
from qfleet.parallel.serving import ServerConfig

Allocate = Callable[[str, tuple[int, ...], Any], NDArray[Any]]
"""Returns the array of a name, shape and dtype: zeros, or what a former life of its role left there."""


class Rounds:
    """The books of mode sync: one step for each round, in which every worker that is left has one gradient.

    Workers number their gradients from 1 and send the next when the round is over, so gradient n belongs to round n.
    """

    def __init__(self, workers: int, allocate: Allocate) -> None:
        self._version: Ints = allocate("version", (1,), np.int64)
        self.arrived: Ints = allocate("arrived", (workers,), np.int64)
        """[W] the newest gradient of each worker that is here."""

    @property
    def version(self) -> int:
        """Rounds that are over."""
        return int(self._version[0])

    @property
    def taken(self) -> Ints:
        """[W] the newest gradient of each worker that was in a round that is over."""
        return np.minimum(self.arrived, self.version)

    def admits(self, worker: int, live: Sequence[int]) -> bool:
        """Return whether a worker's gradient for this round is still to come."""
        return bool(self.arrived[worker] <= self.version)

    def arrive(self, worker: int, sequence: int) -> None:
        """Note a gradient that is here for this round."""
        self.arrived[worker] = sequence

    def present(self) -> list[int]:
        """Return the workers whose gradients for this round are here, in ascending order."""
        return [int(worker) for worker in np.flatnonzero(self.arrived > self.version)]

    def close(self) -> None:
        """Note that this round's step is made."""
        self._version[0] += 1

    def state_dict(self) -> State:
        """Return the books."""
        return {"version": self._version.copy(), "arrived": self.arrived.copy()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`."""
        self._version[:], self.arrived[:] = state["version"], state["arrived"]


class Arrivals:
    """The books of modes async and stale: one step for each gradient, as it comes.

    A worker pulls after its last gradient was taken, so its next one is computed at that version or a later one.
    """

    def __init__(self, config: ServerConfig, workers: int, allocate: Allocate) -> None:
        if config.mode == "async" and config.max_staleness < workers - 1:
            raise ConfigError(
                f"parallel.update.max_staleness {config.max_staleness} is too small for {workers} workers:"
                f" when each has sent one gradient, the next is {workers - 1} versions old; set it to that or more"
            )
        self._config = config
        self.taken: Ints = allocate("arrived", (workers,), np.int64)
        """[W] the newest gradient of each worker that was taken."""
        self.since: Ints = allocate("since", (workers,), np.int64)
        """[W] the version that each worker's newest gradient made."""

    @property
    def version(self) -> int:
        """Gradients taken."""
        return int(self.taken.sum())

    def admits(self, worker: int, live: Sequence[int]) -> bool:
        """Return whether the next gradient of a worker may be taken now; `live` are those that may send more.

        Of these there always is one whose gradient may: the one whose last is the longest ago.
        """
        others = [other for other in live if other != worker]
        if self._config.mode == "stale":
            return all(self.taken[worker] + 1 - self.taken[other] <= self._config.slack for other in others)
        # All others may have their next gradients on the way, and would be taken in this order at best.
        after = self.version + 1
        return all(
            after + place - since <= self._config.max_staleness
            for place, since in enumerate(sorted(int(self.since[other]) for other in others))
        )

    def arrive(self, worker: int, sequence: int) -> None:
        """Note a gradient that was taken."""
        self.since[worker] = self.version + 1
        self.taken[worker] = sequence  # last: the version is the sum of these

    def factor(self, version: int) -> float:
        """Return what the step along a gradient that was computed at `version` is multiplied by."""
        return float((1 + max(self.version - version, 0)) ** -self._config.damping)

    def state_dict(self) -> State:
        """Return the books."""
        return {"taken": self.taken.copy(), "since": self.since.copy()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`."""
        self.taken[:], self.since[:] = state["taken"], state["since"]
