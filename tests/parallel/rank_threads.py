"""Ranks of a real gloo group as threads of one process: the cheapest way to have a group."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from qfleet.parallel.gradsync import GradientGroup

Result = TypeVar("Result")
BUILDING = threading.Lock()
"""Held while a rank builds a network: all threads share torch's random numbers."""


def as_ranks(size: int, work: Callable[[GradientGroup], Result], devices: Sequence[str] | None = None) -> list[Result]:
    """Return what the work returned on each rank, all of them on the host unless `devices` says where."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as pool:

        def rank(number: int) -> Result:
            device = "cpu" if devices is None else devices[number]
            group = GradientGroup(number, size, f"file://{Path(folder)}/meet", 30.0, device)
            try:
                return work(group)
            finally:
                group.close()

        return list(pool.map(rank, range(size)))
