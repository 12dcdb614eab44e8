"""Waits for bells; to wait again for the same ones costs one system call and little else."""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Any, Protocol


class Waited(Protocol):
    """What can be waited for."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""

    def silence(self) -> None:
        """Make it unreadable again: whoever waited looks at the reason itself."""


class Waiter:
    """What one thread waits with, beside an alarm by which another thread wakes it."""

    def __init__(self, alarm: Any) -> None:
        self._alarm: int = alarm.fileno()
        self._waitables: list[Waited] = []
        self._descriptors: dict[int, Waited] = {}
        self._poll = self._polling()

    def wait(self, waitables: Sequence[Waited], seconds: float | None) -> bool:
        """Wait until one can be read from, or its other end is gone, or the time is up; returns whether it was the
        alarm. Those that could be read from are silenced."""
        wanted = list(waitables)
        if wanted != self._waitables:
            self._waitables, self._descriptors = wanted, {waitable.fileno(): waitable for waitable in wanted}
            self._poll = self._polling()
        # in whole milliseconds, not less: to wake up too early would be to wait twice
        changed = [
            which for which, _ in self._poll.poll(None if seconds is None else math.ceil(max(seconds, 0.0) * 1e3))
        ]
        for descriptor in changed:
            if descriptor != self._alarm:
                self._descriptors[descriptor].silence()
        return self._alarm in changed

    def _polling(self) -> select.poll:
        poll = select.poll()
        for descriptor in (self._alarm, *self._descriptors):
            poll.register(descriptor, select.POLLIN)
        return poll
