"""Signals that would end a run are held back for a moment in which they would leave something behind."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to end."""


class HeldBack:
    """The signals that came meanwhile; none is kept for later once so many seconds have passed."""

    def __init__(self, limit_s: float) -> None:
        self._until = time.monotonic() + limit_s
        self._came: list[int] = []
        self._before = {number: signal.getsignal(number) for number in ENDINGS}
        self._noted = [number for number, was in self._before.items() if was not in (None, signal.SIG_IGN)]

    def begin(self) -> None:
        """Note signals from now on."""
        for number in self._noted:
            signal.signal(number, self._note)

    def end(self) -> None:
        """Put the usual handlers back."""
        for number in self._noted:
            signal.signal(number, self._before[number])

    def deliver(self) -> None:
        """Let them do what they would have done: the usual handlers are back."""
        came, self._came = self._came, []
        for number in dict.fromkeys(came):
            signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        if time.monotonic() > self._until:
            self.end()
            self.deliver()


@contextmanager
def held_back(limit_s: float = math.inf) -> Iterator[HeldBack]:
    """Hold signals back until `deliver` is called afterwards; only the main thread can, elsewhere nothing changes.

    They are noted, not masked: a mask would be handed down to processes that are begun meanwhile. One that is ignored,
    or handled by something other than Python, stays so. After `limit_s` seconds the next one is heeded at once, with
    those before it; and so are all when an error ends the moment.
    """
    held = HeldBack(limit_s)
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    held.begin()
    try:
        yield held
    except BaseException:
        held.end()
        held.deliver()  # who catches the error would not think of it
        raise
    held.end()
