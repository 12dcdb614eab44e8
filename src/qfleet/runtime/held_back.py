"""Signals that would end a run are held back for a moment in which they would leave something behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to end."""


class HeldBack:
    """The signals that came meanwhile."""

    def __init__(self) -> None:
        self._came: list[int] = []

    def deliver(self) -> None:
        """Let them do what they would have done: the usual handlers are back."""
        came, self._came = self._came, []
        for number in dict.fromkeys(came):
            signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)


@contextmanager
def held_back() -> Iterator[HeldBack]:
    """Hold signals back until `deliver` is called afterwards; only the main thread can, elsewhere nothing changes.

    They are noted, not masked: a mask would be handed down to processes that are begun meanwhile. One that is ignored,
    or handled by something other than Python, stays so.
    """
    held = HeldBack()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = {number: signal.getsignal(number) for number in ENDINGS}
    noted = [number for number, handler in before.items() if handler not in (None, signal.SIG_IGN)]
    for number in noted:
        signal.signal(number, held._note)
    try:
        yield held
    finally:
        for number in noted:
            signal.signal(number, before[number])
