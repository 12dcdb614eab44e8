"""Tells of what happens again and again in measure: the first few times at once, then now and then how often it was."""

from __future__ import annotations

import time
from collections.abc import Iterable

AT_ONCE = 10
"""So many are told one by one,"""
EVERY_S = 60.0
"""in so many seconds; those beyond are told as one when these are over."""
_BEYOND = f"(more within {EVERY_S:.0f} s are counted, and told as one)"


class Telling:
    """Decides which of many texts are told, and when."""

    def __init__(self) -> None:
        self._since, self._told, self._held, self._last = time.monotonic(), 0, 0, ""

    def of(self, texts: Iterable[str]) -> list[str]:
        """Return what is to be told now, when these have come."""
        now, found = time.monotonic(), []
        if now - self._since >= EVERY_S:
            if self._held:
                found.append(f"{self._held} more in {now - self._since:.0f} s, the last: {self._last}")
            self._since, self._told, self._held = now, len(found), 0
        for text in texts:
            if self._told < AT_ONCE:
                self._told += 1
                found.append(text if self._told < AT_ONCE else f"{text} {_BEYOND}")
            else:
                self._held, self._last = self._held + 1, text
        return found
