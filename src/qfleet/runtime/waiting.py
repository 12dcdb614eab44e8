"""Waits for sockets and pipes; to wait again for the same ones costs one system call and little else."""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Any


class Waiter:
    """What one thread waits with, beside an alarm by which another thread wakes it."""

    def __init__(self, alarm: Any) -> None:
        self._alarm: int = alarm.fileno()
        self._waitables: list[Any] = []
        self._poll = self._polling([])

    def wait(self, waitables: Sequence[Any], seconds: float | None) -> bool:
        """Wait until one can be read from, or its other end is gone, or the time is up; returns whether it was the
        alarm."""
        wanted = list(waitables)
        if wanted != self._waitables:
            self._waitables, self._poll = wanted, self._polling(wanted)
        # in whole milliseconds, not less: to wake up too early would be to wait twice
        changed = self._poll.poll(None if seconds is None else math.ceil(max(seconds, 0.0) * 1e3))
        return any(descriptor == self._alarm for descriptor, _ in changed)

    def _polling(self, waitables: Sequence[Any]) -> select.poll:
        poll = select.poll()
        for descriptor in (self._alarm, *(waitable.fileno() for waitable in waitables)):
            poll.register(descriptor, select.POLLIN)
        return poll
