"""How often and how soon a role that died is begun anew."""

from __future__ import annotations

QUICK_S = 60.0
"""A death that follows another one of the same role sooner than this counts with it."""


class Restarts:
    """Counts the deaths of each role that follow each other quickly; `most` of them in a row are survived."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._deaths: dict[str, tuple[int, float]] = {}
        """How many in a row, and when the last one was."""

    def delay(self, name: str, now: float) -> float | None:
        """Note a death; returns the seconds to wait before the next life, None if there is to be none."""
        count, last = self._deaths.get(name, (0, -QUICK_S))
        count = count + 1 if now - last < QUICK_S else 1
        self._deaths[name] = (count, now)
        if count > self._most:
            return None
        return 0.0 if count == 1 else 2.0 ** (count - 2)

    def in_a_row(self, name: str) -> int:
        """Return how many deaths of a role followed each other quickly."""
        return self._deaths.get(name, (0, 0.0))[0]
