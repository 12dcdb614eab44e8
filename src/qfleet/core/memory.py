"""How a process keeps the memory that it frees."""

from __future__ import annotations

import contextlib
import ctypes
import os

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Names of malloc's settings, as malloc.h has them."""
_LARGEST = 32 << 20
"""Bytes of the largest piece that is kept; malloc takes no larger number."""
_KEPT = 512 << 20
"""Bytes that may lie unused at the end of the heap before they are given back."""


def keep_freed_memory() -> None:
    """Let this process use the memory that it frees again, in place of giving it back and asking for it anew.

    Every update frees what it computed with. Where malloc then gives tens of megabytes back to the system, the next
    update has them mapped anew, page by page, which costs a learner of frames on a CPU a quarter of its time. Does
    nothing where malloc is not GNU's, or somebody has set it up already.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(AttributeError, OSError):  # no such function, or no library to look for it in
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
