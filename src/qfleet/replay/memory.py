"""Refuses a replay that would not fit the memory or the disk, and shows the arithmetic."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil

from qfleet.core.errors import ConfigError

_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
ASSUMED_COMPRESSION = 10
"""What LZ4 is assumed to gain on game frames, to judge a capacity before anything is stored."""


def available_memory() -> int:
    """Return the bytes this process may still take: what the system has free, and what its cgroup allows."""
    available = int(psutil.virtual_memory().available)
    for limit, usage in _CGROUPS:
        try:
            available = min(available, int(limit.read_text()) - int(usage.read_text()))
        except (OSError, ValueError):  # no such controller, or its limit is the word "max"
            continue
    return max(available, 0)


def check_fits(rows: int, columns: Mapping[str, float], available: int, place: str, advice: str) -> None:
    """Raise ConfigError when `rows` rows of `columns` (bytes a row, by name) exceed `available` bytes of `place`."""
    total = rows * sum(columns.values())
    if total <= available:
        return
    terms = "\n".join(
        f"  {name}: {rows:,} rows x {size:,.1f} B = {_gib(rows * size)}" for name, size in columns.items()
    )
    fitting = int(available / sum(columns.values()))
    raise ConfigError(
        f"replay.capacity does not fit the {place}:\n{terms}\n  in all {_gib(total)}, but only {_gib(available)} are "
        f"available\nlower replay.capacity to at most {fitting:,} rows{advice}"
    )


def available_disk(directory: Path) -> int:
    """Return the free bytes of the disk that holds `directory` (or its nearest existing parent)."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"
