"""What wakes the other end of a stream: named pipes, which any process of the machine can open and none can break."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal

Side = Literal["sender", "receiver"]

_MANY_BELLS = 1 << 16
"""As many as a pipe holds."""


def create_bells(stem: Path) -> None:
    """Make the two pipes of a stream."""
    for side in ("sender", "receiver"):
        os.mkfifo(_pipe(stem, side), 0o600)


class Bell:
    """One side's part of the two: it rings the other's pipe and waits on its own.

    Both are opened to be read and written, so that a pipe is never without a reader or a writer, whoever dies. One
    that is full of rings wakes too, so that a ring never has to wait.
    """

    def __init__(self, stem: Path, side: Side) -> None:
        self._own = _open(stem, side)
        self._other = _open(stem, "receiver" if side == "sender" else "sender")

    def ring(self) -> None:
        """Wake the other end, now or when it next waits."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._other, b"!")

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._own

    def silence(self) -> None:
        """Forget the rings so far, as whoever waited does; look at the cursors after this, or one would be missed."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._own, _MANY_BELLS)

    def waitable(self) -> Bell:
        """Return itself, which becomes readable when it rings."""
        return self

    def __del__(self) -> None:
        for pipe in ("_own", "_other"):
            if hasattr(self, pipe):  # opening it may be what failed
                os.close(getattr(self, pipe))


def _open(stem: Path, side: str) -> int:
    return os.open(_pipe(stem, side), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def _pipe(stem: Path, side: str) -> Path:
    return stem.with_name(f"{stem.name}.{side}")
