"""What a system has run out of when it refuses files, processes or memory, and what a person can do about it."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from qfleet.core.errors import QfleetError

NO_PROCESSES = "raise the limit of processes (`ulimit -u`, or the container's), or run fewer actors"
"""What to do where processes cannot be begun."""


def exhausted(error: OSError) -> str:
    """Return what the system has run out of and what to do about it; empty if an error is about something else."""
    if error.errno == errno.EMFILE:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"all {files} files that a process may open are open: raise that limit (`ulimit -n`), or run fewer actors"
        )
    if error.errno == errno.ENFILE:
        return "all files that this machine can open are open: end other programs, or raise fs.file-max (`sysctl`)"
    if error.errno == errno.ENOMEM:
        return "this machine has no memory left: end other programs, run fewer actors, or lower replay.capacity"
    return ""


@contextmanager
def exhaustion_told() -> Iterator[None]:
    """Have errors of a system that has run out of something say what to do about it."""
    try:
        yield
    except OSError as error:
        if text := exhausted(error):
            raise QfleetError(text) from error
        raise
