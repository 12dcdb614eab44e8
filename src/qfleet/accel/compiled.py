"""How loops for a CPU are compiled: by numba, once, then cached.

A loop may call only loops of its own file, because the cache notices a change of its own file alone. What is not
a number is passed on, never taken for 0: the finite flag of an update depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

from qfleet.core.compiling import cached

F = TypeVar("F", bound=Callable[..., Any])

FLOATS, INTS, BOOLS = "float32[::1]", "int64[::1]", "boolean[::1]"
"""Types of arrays without gaps."""
MATRIX, CUBE = "float32[:,::1]", "float32[:,:,::1]"
_REORDERED = {"reassoc", "contract"}


def compiled(*types: str, result: str = "void") -> Callable[[F], F]:
    """Return what compiles a function of these types: at the import of its file, not while training.

    Sums may be reordered and products contracted, always in the same way on the same machine.
    """
    return cached(f"{result}({','.join(types)})", error_model="numpy", fastmath=_REORDERED)


def part(function: F) -> F:
    """Return a function that compiled ones of the same file may call; it becomes part of them.

    Always: compiled apart, it would round otherwise in a process that compiles than in one that finds the cache filled.
    """
    return cast("F", numba.njit(function, error_model="numpy", fastmath=_REORDERED, forceinline=True))
