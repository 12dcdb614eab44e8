"""How far the lives of one actor have come: known to the next one, so that no message's number is used twice."""

from __future__ import annotations

import numpy as np

from qfleet.core.protocols import Keep
from qfleet.core.types import Ints

_LIFE = 2**40
"""Messages of one life at most: a later one numbers its own from the next multiple."""
_COUNTED, _SENT, _LOST, _SEQUENCE = range(4)


class Progress:
    """The steps that an actor has counted and sent, and the number of its next message."""

    def __init__(self, keep: Keep | None) -> None:
        self.life = 0 if keep is None else keep.life
        self._cells: Ints = np.zeros(4, np.int64) if keep is None else keep.array("progress", (4,), np.int64)
        if self.life:
            self._cells[_LOST] += self._cells[_COUNTED] - self._cells[_SENT]
            self._cells[_SENT] = self._cells[_COUNTED]
            # The life may be the greater one: of an actor that was away when its run was saved nothing else is known.
            self._cells[_SEQUENCE] = max(self._cells[_SEQUENCE] // _LIFE + 1, self.life) * _LIFE

    @property
    def sequence(self) -> int:
        """The number of the next message."""
        return int(self._cells[_SEQUENCE])

    @property
    def counted(self) -> int:
        """Steps of all lives."""
        return int(self._cells[_COUNTED])

    @property
    def lost(self) -> int:
        """Steps that former lives have counted but not sent."""
        return int(self._cells[_LOST])

    def count(self, steps: int) -> None:
        """Note steps that the run counts from now on."""
        self._cells[_COUNTED] += steps

    def sent(self, sequence: int) -> None:
        """Note that everything counted was sent, and the number of the next message."""
        self._cells[_SENT] = self._cells[_COUNTED]
        self._cells[_SEQUENCE] = sequence
