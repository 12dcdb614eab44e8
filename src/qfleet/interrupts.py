"""What signals do to a run: the first ends it cleanly, the next ones at once, and none while it is being closed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from qfleet.control.monitor import Monitor
from qfleet.core.protocols import Placement
from qfleet.runtime.ownership import interrupt_main_thread
from qfleet.runtime.supervisor import SupervisedPlacement

T = TypeVar("T")
_SECOND_SIGNAL_S = 0.5
"""A second Ctrl-C that comes sooner than this is taken for the first one."""


@dataclass
class Interrupts:
    """Ctrl-C, SIGTERM, a closed terminal, `qfleet stop`: the first one ends a run that goes on cleanly, others at once.

    Where it ends at once, everything is closed first, and no further signal cuts that short.
    """

    count: int = 0
    _last: float = -1.0
    _at_once: bool = False
    _ignored: bool = False
    _handled: bool = False
    """Whether signals come here."""
    _monitor: Monitor | None = None
    _hurry: Callable[[], None] | None = None

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals meanwhile; only the main thread can, elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which it is under `nohup`
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._interrupt) for number in numbers}
        self._handled = True
        try:
            yield
        finally:
            self._handled = False
            for number, handler in before.items():
                signal.signal(number, handler)

    def asked(self) -> bool:
        """Return whether the run is to end."""
        return self.count > 0

    def ask(self) -> bool:
        """End the run as a signal does, from another thread; returns whether that is heeded now.

        A run that is being ended already is left in peace.
        """
        if self.count:
            return True
        if self._ignored:  # it goes back to a checkpoint
            return False
        if self._handled:
            return interrupt_main_thread()
        self.count += 1  # no signal can cut in: the run ends where its monitor looks
        self._wind_up()
        return True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        soon, self._last = self.count > 0 and now - self._last < _SECOND_SIGNAL_S, now
        if soon or self._ignored:
            return
        self.count += 1
        self._wind_up()
        if self._monitor is None or self._at_once or self.count > 1:
            self._ignored = not self._at_once  # of which any number may be cut short
            raise KeyboardInterrupt

    def _wind_up(self) -> None:
        if self._monitor is not None:
            self._monitor.stop("interrupt")
        if self._hurry is not None:
            self._hurry()

    @contextmanager
    def stopping(self, monitor: Monitor, placement: Placement) -> Iterator[None]:
        """Let a first signal end the monitor's run, which saves it, instead of cutting in; no role may hold that up."""
        self._monitor = monitor
        self._hurry = placement.hurry if isinstance(placement, SupervisedPlacement) else None
        if self.count:  # asked for while it was built
            self._wind_up()
        try:
            yield
        finally:
            self._monitor = self._hurry = None

    def ignore(self) -> None:
        """Heed no further signal."""
        self._ignored = True

    def heed(self) -> None:
        """Heed signals again: the run goes on."""
        self._ignored = False

    def at_once(self, work: Callable[[], T]) -> T | None:
        """Do work of which nothing needs to be saved; a signal cuts it short, and then the result is None, as it is
        where one came before."""
        self._at_once = True
        try:
            return None if self.count else work()
        except KeyboardInterrupt:
            return None
        finally:
            self._at_once = False
