"""How often a piece of work is done in a second, on a device that works while Python goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from qfleet.accel.graphs import WARMUPS

Work = Callable[[], object]


def per_second(work: Work, seconds: float) -> float:
    """Return how often the work is done in a second, after a warm-up, from about `seconds` of it."""
    for _ in range(WARMUPS + 2):
        work()
    calls = max(int(2 * seconds / _seconds(work, 2)), 1)
    return calls / _seconds(work, calls)


def _seconds(work: Work, calls: int) -> float:
    synchronise()
    began = time.perf_counter()
    for _ in range(calls):
        work()
    synchronise()
    return time.perf_counter() - began


def synchronise() -> None:
    """Wait for the device, where there is one to wait for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
