"""Writes down what roles did in an order that matters, for a checker that reads it when the run is over.

`QFLEET_HISTORY=FOLDER` has every life of every role write lines into a file of its own there; else nothing is noted.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "QFLEET_HISTORY"
_file: int | None = None


def wanted() -> str:
    """Return the folder that the environment names, empty for none."""
    return os.environ.get(VARIABLE, "")


def begin(folder: str, role: str, life: int) -> None:
    """Make this process, which is `role` in its `life`, note what it does; does nothing without a folder."""
    global _file
    _file = None
    if folder:
        path = Path(folder) / f"{role}.{life}.{os.getpid()}"
        _file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)


def note(what: str, *numbers: int) -> None:
    """Note something before it can be seen by others; costs nothing where nothing is noted."""
    if _file is not None:
        os.write(_file, " ".join([str(time.monotonic_ns()), what, *map(str, numbers)]).encode() + b"\n")
