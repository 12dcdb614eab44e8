"""How the threads of numerical libraries wait for each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SPINS, _ROUNDS = "GOMP_SPINCOUNT", "1000"


@contextmanager
def brief_spinning() -> Iterator[None]:
    """Let threads sleep after a short spin, in libraries that are loaded and processes that are begun meanwhile.

    GNU's OpenMP, which torch computes with, spins for milliseconds otherwise. As soon as another program wants the same
    cores, each of them waits for a thread that the others' spinning keeps from running, and both all but stand still.
    Who has set a policy keeps it.
    """
    if "OMP_WAIT_POLICY" in os.environ or _SPINS in os.environ:
        yield
        return
    os.environ[_SPINS] = _ROUNDS
    try:
        yield
    finally:
        os.environ.pop(_SPINS, None)
