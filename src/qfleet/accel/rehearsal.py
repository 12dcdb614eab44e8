"""Does in a thread what is compiled when it is first done, while the other parts of a run are compiled too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


class Rehearsal:
    """A piece of work whose outcome nobody needs: what fails in it will fail again where somebody hears of it."""

    def __init__(self, work: Callable[[], object]) -> None:
        """Begin at once; the work must not touch what the caller goes on with."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="rehearsal", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until it is over: two threads would compile the same thing twice."""
        self._thread.join()

    def _run(self, work: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            work()
