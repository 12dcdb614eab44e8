"""How busy the cores are that a run may use, by whatever runs on them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil

from qfleet.control.resources import usable_cores

_CONTAINER = Path("/sys/fs/cgroup/cpu.stat")
"""Where Linux counts the processor time of all processes of a container."""


class Cores:
    """Looks again and again."""

    def __init__(self) -> None:
        self.count = usable_cores()
        own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        self._own = tuple(own)
        self._limited = self.count < len(self._own)
        self._last = self._spent(), time.monotonic()

    def busy(self) -> float | None:
        """Return the share of their time since the last call in which they worked; None where nobody counts it."""
        (then, at), now = self._last, (self._spent(), time.monotonic())
        self._last = now
        if then is None or now[0] is None or now[1] <= at:
            return None
        return min(1.0, max(0.0, (now[0] - then) / (now[1] - at) / self.count))

    def _spent(self) -> float | None:
        """Return the processor time so far, in seconds: of the container where it has a quota, or else of the cores."""
        try:
            if self._limited:
                return _of_container()
            times = psutil.cpu_times(percpu=True)
            return sum(_working(times[index]) for index in self._own)
        except (OSError, ValueError, IndexError):
            return None


def _of_container() -> float:
    fields = dict(line.split() for line in _CONTAINER.read_text().splitlines())
    return int(fields.get("usage_usec", "")) / 1e6


def _working(times: Any) -> float:
    """Return the seconds in which a core did not idle; a guest's are among those of its host already."""
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(spent for name, spent in times._asdict().items() if name not in idle))
