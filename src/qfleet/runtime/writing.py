"""Who writes the parts of a checkpoint: threads beside the roles, one in each process, while these go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from qfleet.core.errors import CheckpointError, PartLost
from qfleet.runtime.captured import Captured


class OwnWriting:
    """States that were captured in this process, to be written one after the other."""

    def __init__(self, states: Sequence[Captured]) -> None:
        self._states = states
        self._abandoned = threading.Event()

    def finish(self) -> None:
        """Write all of them."""
        for state in self._states:
            state.write(self._abandoned)

    def abandon(self) -> None:
        """Have `finish` end soon, with an error."""
        self._abandoned.set()


class PartWriting(OwnWriting):
    """The same in a thread, which tells how it ended unless it was abandoned: "" if all is written, else why not."""

    def __init__(self, states: Sequence[Captured], tell: Callable[[str], None]) -> None:
        super().__init__(states)
        self._tell = tell
        self._thread = threading.Thread(target=self._run, name="writing", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _run(self) -> None:
        cause = ""
        try:
            self.finish()
        except (CheckpointError, OSError) as error:
            cause = str(error)
        except Exception as error:  # whoever waits for all parts must hear of any end
            cause = f"{type(error).__name__}: {error}"
        if not self._abandoned.is_set():
            self._tell(cause)

    def end(self, seconds: float) -> None:
        """Abandon it, and wait for its end, at most so long."""
        self.abandon()
        if self._thread.is_alive():
            self._thread.join(seconds)


class CrewWriting:
    """The parts that workers write, and then what is left to this process; heard in one thread, awaited in another."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._busy: set[str] = set()
        self._failures: list[CheckpointError] = []
        self._own: Sequence[Callable[[], None]] = ()
        self._taken = False

    def begun(self, name: str) -> None:
        """Note that a worker has captured its state, and writes it from now on."""
        with self._news:
            self._busy.add(name)

    def taken(self, own: Sequence[Callable[[], None]]) -> None:
        """Note that all states have been captured; `own` is to be done when all workers have written theirs."""
        self._own, self._taken = own, True

    def ended(self, name: str, failure: CheckpointError | None = None) -> None:
        """Note that a worker has written its part, or why it will not."""
        with self._news:
            if name in self._busy:
                self._busy.remove(name)
                self._failures += [] if failure is None else [failure]
                self._news.notify_all()

    def died(self, name: str) -> None:
        """Note that a worker is gone; one that is begun anew before all have captured their states is asked again."""
        lost = PartLost(f"{name} died while it wrote its part of the checkpoint")
        self.ended(name, lost if self._taken else None)

    def abandon(self) -> None:
        """Wait for nobody any more."""
        with self._news:
            if self._busy:
                self._failures.append(CheckpointError("the run ended before all parts of the checkpoint were written"))
            self._busy.clear()
            self._news.notify_all()

    def finish(self) -> None:
        """Wait for all workers, then do the rest; CheckpointError if one could not write its part."""
        with self._news:
            self._news.wait_for(lambda: not self._busy)
        if self._failures:
            raise self._failures[0]
        for part in self._own:
            part()
