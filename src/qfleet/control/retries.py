"""When something is tried again that could not be done: ever later, since each try costs, but never too late."""

from __future__ import annotations

FIRST_S, LONGEST_S = 1.0, 60.0
"""Seconds before the first further try, and at most between two."""


class Retries:
    """Counts by name what could not be done, in a row; times are seconds of any clock."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._due: dict[str, float] = {}

    def due(self, name: str, now: float) -> bool:
        """Return whether it is time to try this."""
        return now >= self._due.get(name, now)

    def failed(self, name: str, now: float) -> None:
        """Note that a try has just failed."""
        failures = self._failures.get(name, 0)
        self._failures[name] = failures + 1
        self._due[name] = now + min(FIRST_S * 2.0 ** min(failures, 10), LONGEST_S)

    def forget(self, name: str) -> None:
        """Begin again: it was done, or somebody wants it anew."""
        self._failures.pop(name, None)
        self._due.pop(name, None)
