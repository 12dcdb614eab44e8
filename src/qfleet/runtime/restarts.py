"""How often and how soon a role that died is begun anew."""

from __future__ import annotations

_LONGEST_S = 60.0
"""No next life is waited for longer."""


class Restarts:
    """Counts the deaths of each role after short lives, of which `most` in a row are survived.

    A life is short that was at work for less than `quick_s` seconds.
    """

    def __init__(self, most: int, quick_s: float) -> None:
        self._most, self._quick_s = most, quick_s
        self._deaths: dict[str, int] = {}
        """How many in a row."""

    def delay(self, name: str, lived_s: float) -> float | None:
        """Note a death after so many seconds at work.

        Returns the seconds to wait before the next life, None if there is to be none.
        """
        count = self._deaths.get(name, 0) + 1 if lived_s < self._quick_s else 0
        self._deaths[name] = count
        if count > self._most:
            return None
        return 0.0 if count <= 1 else min(2.0 ** min(count - 2, 10), _LONGEST_S)

    def too_many(self, name: str) -> str:
        """Return how many deaths of a role followed each other after short lives, and the setting that allows fewer."""
        deaths = f"that was death {self._deaths.get(name, 0)} in a row"
        return f"{deaths} after little or no work (survival.restarts {self._most})"
