"""When a run is saved: every so many steps, every few minutes, and before more is new than can soon be written."""

from __future__ import annotations

import math
import time

from qfleet.experiment import CheckpointConfig

RETRY_S = 30.0
"""How soon a checkpoint that could not be written is tried again."""


class Due:
    """Knows when the next checkpoint of a run is due whose replay grows by `row_bytes` with each environment step.

    A replay that is no larger than what may be new has no say, nor has one of which nothing is known: 0 bytes.
    """

    def __init__(self, config: CheckpointConfig, env_steps: int, row_bytes: float = 0.0, capacity: int = 0) -> None:
        self._config = config
        unsaved = 1e6 * config.unsaved_mb
        self._most_steps = unsaved / row_bytes if row_bytes * capacity > unsaved else math.inf
        self._failing_since: float | None = None
        self.begin(env_steps)

    def begin(self, env_steps: int) -> None:
        """Note that the run is as it is saved now, or was when it began."""
        self._steps, self._at, self._lost = env_steps, time.perf_counter(), False

    def lose(self) -> None:
        """Note that what was to be saved is lost, and can be taken anew at once."""
        self._lost = True

    def fail(self) -> bool:
        """Note that a checkpoint could not be written; return whether the one before it could."""
        first, self._at = self._failing_since is None, time.perf_counter()
        self._failing_since = self._at if first else self._failing_since
        return first

    def succeed(self) -> float | None:
        """Note that one is written; return for how many seconds none could be, None if all could."""
        since, self._failing_since = self._failing_since, None
        return None if since is None else time.perf_counter() - since

    def now(self, env_steps: int) -> bool:
        """Return whether the next one is due."""
        config, failing = self._config, self._failing_since is not None
        if time.perf_counter() - self._at >= (min(config.every_s, RETRY_S) if failing else config.every_s):
            return True
        if not failing and env_steps - self._steps >= self._most_steps:
            return True
        return self._lost or env_steps // config.every > self._steps // config.every
