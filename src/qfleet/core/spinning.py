"""How the threads of numerical libraries wait for each other."""

from __future__ import annotations

import os

ROUNDS = "1000"


def wait_politely() -> None:
    """Let threads of libraries that are loaded from now on sleep after a short spin, as do those of child processes.

    GNU's OpenMP, which torch computes with, spins for milliseconds otherwise. As soon as another program wants the same
    cores, each of them waits for a thread that the others' spinning keeps from running, and both all but stand still.
    Who has set a policy keeps it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", ROUNDS)
