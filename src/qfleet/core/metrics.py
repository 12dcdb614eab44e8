"""What roles keep to make the numbers they report: the last few values of a kind."""

from __future__ import annotations

import math
from collections import deque
from typing import Any


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
