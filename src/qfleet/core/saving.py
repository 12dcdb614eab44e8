"""A checkpoint on its way to the disk: written in a thread of its own, while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path


class Saving:
    """One checkpoint, as of `env_steps`: `work` writes it and returns its path, `abandon` has that end soon.

    What `work` adds to `remarks` went wrong beside it.
    """

    def __init__(
        self, env_steps: int, work: Callable[[], Path], abandon: Callable[[], None], remarks: Sequence[str] = ()
    ) -> None:
        self.env_steps, self.abandon, self.remarks = env_steps, abandon, remarks
        self._work = work
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="saving")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._path = self._work()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it is written, or cannot be."""
        return not self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        """Wait for its end, at most so long."""
        self._thread.join(seconds)

    def path(self) -> Path:
        """Return where it is, once it is done; raises what kept it from being written."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path
