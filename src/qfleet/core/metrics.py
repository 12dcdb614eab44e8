"""Small counters from which roles make the numbers they report."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor


class RunningMean:
    """The mean of what was added since it was last taken; adding a tensor does not wait for its device."""

    def __init__(self) -> None:
        self._total: float | Tensor = 0.0
        self._count = 0

    def add(self, value: float | Tensor) -> None:
        """Add one number, or a scalar tensor."""
        self._total = self._total + (value.detach() if isinstance(value, Tensor) else value)
        self._count += 1

    def take(self) -> float:
        """Return the mean (NaN if nothing was added) and begin anew. Waits for the device of added tensors."""
        mean = float(self._total) / self._count if self._count else math.nan
        self._total, self._count = 0.0, 0
        return mean


class Window:
    """The last few values, such as the returns of the latest 100 episodes."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Add a value; the oldest one goes when there are more than the size."""
        self._values.append(float(value))

    def mean(self) -> float:
        """Return the mean of the values held, NaN if there are none."""
        return math.fsum(self._values) / len(self._values) if self._values else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return the values, oldest first."""
        return {"values": list(self._values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._values = deque(state["values"], maxlen=self._values.maxlen)


class Rate:
    """Amounts per second since the last reading: events give a speed, busy seconds the busy share of the time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._amount = 0.0

    def add(self, amount: float) -> None:
        """Add an amount that has happened now."""
        self._amount += amount

    def take(self) -> float:
        """Return the amount per second since the last reading (or the start) and begin anew; 0 if no time passed."""
        now = self._clock()
        seconds = now - self._since
        if seconds <= 0:
            return 0.0
        rate = self._amount / seconds
        self._since, self._amount = now, 0.0
        return rate
