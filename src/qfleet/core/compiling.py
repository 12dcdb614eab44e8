"""Compiles loops by numba, and keeps what was compiled where there is a directory that can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import event

from qfleet.core.announcing import announce

F = TypeVar("F", bound=Callable[..., Any])

_not_kept: set[str] = set()


class _Announcement(event.Listener):
    """Says once in a process that loops are being compiled."""

    said = False

    def on_start(self, event: Any) -> None:
        """Hear that a compilation begins; what comes from the cache is none."""
        if not self.said:
            self.said = True
            announce("compiling loops for this processor, once: seconds to a minute")

    def on_end(self, event: Any) -> None:
        """Hear that one is over."""


event.register("numba:compile", _Announcement())  # type: ignore[no-untyped-call]


def cached(*signatures: str, **options: Any) -> Callable[[F], F]:
    """Return numba's compiler with these options; what cannot be kept for the next process is compiled in each."""

    def compile_and_keep(function: F) -> F:
        njit: Any = numba.njit
        try:
            return cast("F", njit(*signatures, cache=True, **options)(function))
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            _not_kept.add(function.__name__)
            return cast("F", njit(*signatures, **options)(function))

    return compile_and_keep


def why_not_kept() -> str:
    """Return why compiled loops are compiled anew in every process; empty if they are kept."""
    return "numba finds no directory that it can write (set NUMBA_CACHE_DIR)" if _not_kept else ""
