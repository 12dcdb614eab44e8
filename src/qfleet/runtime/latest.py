"""A latest value in shared memory: one writer, many readers, no lock, and no copy taken for whole that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.core.role import State
from qfleet.runtime import framing
from qfleet.runtime.framing import Buffer, Frame, Sealed
from qfleet.runtime.memory import SlotReader, SlotWriter, attach, create

Cells = NDArray[np.int64]

_NEWEST, _SLOTS = 0, 1
"""Where the cells begin: the newest stamp, then four cells for each of the two slots."""
_STAMP, _GENERATION, _NBYTES, _SUM = range(4)
_READ_ATTEMPTS = 20


def create_latest(stem: Path) -> None:
    """Make the cells of a latest value that has none yet."""
    create(stem, 8 * (_SLOTS + 2 * 4))


class LatestPublisher:
    """The writing end of a latest value: writes the slot that readers are not sent to, then sends them there."""

    def __init__(self, stem: Path) -> None:
        self._cells: Cells = attach(stem).view(np.int64)
        self._reader = LatestSubscriber(stem)
        self._writers = [
            SlotWriter(stem.with_name(f"{stem.name}.{slot}"), int(_slot_cells(self._cells, slot)[_GENERATION]))
            for slot in (0, 1)
        ]

    def publish(self, message: Any) -> None:
        """Replace the value."""
        self.place(Frame(message), self.newest() + 1)

    def newest(self) -> int:
        """Return the stamp of the newest value, 0 if there is none."""
        return int(self._cells[_NEWEST])

    def state(self) -> State:
        """Return the value and its stamp."""
        return {"stamp": self.newest(), "value": self._reader.peek()}

    def load(self, state: State) -> None:
        """Continue with a former value under its stamp."""
        if state["stamp"]:
            self.place(Frame(state["value"]), state["stamp"])

    def place(self, frame: Frame | Sealed, stamp: int) -> None:
        """Replace the value by one that may have been published elsewhere, under this stamp."""
        slot = stamp % 2
        cells = _slot_cells(self._cells, slot)
        cells[_STAMP] = 0  # a reader that is still in this slot sees that its copy may be torn
        written = self._writers[slot].write(frame)
        cells[_GENERATION], cells[_NBYTES] = self._writers[slot].generation, written.size
        cells[_SUM] = _word_sum(written)
        cells[_STAMP] = stamp
        self._cells[_NEWEST] = stamp


class LatestSubscriber:
    """A reading end of a latest value; with `views` each value lies where the one before it lay."""

    def __init__(self, stem: Path, views: bool = False) -> None:
        self._cells: Cells = attach(stem).view(np.int64)
        self._readers = [SlotReader(stem.with_name(f"{stem.name}.{slot}")) for slot in (0, 1)]
        self._views = views
        self._room: Buffer = framing.empty(0)
        self._seen = 0

    def waitable(self) -> None:
        """Nothing to wait on: a reader of a latest value gives a deadline."""

    def latest(self) -> Any | None:
        """Return the newest value if it was not returned before; None also when it is being replaced right now."""
        return None if self._cells[_NEWEST] == self._seen else self.peek()

    def peek(self) -> Any | None:
        """Return the newest value even if it was returned before."""
        found = self.sealed()
        if found is None:
            return None
        self._seen, buffer = found
        return framing.read(buffer)

    def newest(self) -> int:
        """Return the stamp of the newest value, 0 if there is none."""
        return int(self._cells[_NEWEST])

    def sealed(self) -> tuple[int, Buffer] | None:
        """Return the newest value's stamp and frame; None if there is none, or it is being replaced right now."""
        for _ in range(_READ_ATTEMPTS):
            stamp = self.newest()
            buffer = self._copy(stamp)
            if buffer is not None:
                return stamp, buffer
        return None

    def _copy(self, stamp: int) -> Buffer | None:
        cells = _slot_cells(self._cells, stamp % 2)
        found, generation, nbytes, total = (int(cell) for cell in cells)
        if found != stamp or stamp == 0:
            return None
        try:
            buffer = self._own(self._readers[stamp % 2].view(generation, nbytes))
        except FileNotFoundError:  # outgrown and replaced since
            return None
        whole = cells[_STAMP] == stamp and _word_sum(buffer) == total
        return buffer if whole else None

    def _own(self, shared: Buffer) -> Buffer:
        """Return a copy; fresh memory costs more than the copying, so it is used again where the reader allows it."""
        if not self._views:
            return framing.copy(shared)
        if self._room.size < shared.size:
            self._room = framing.empty(shared.size)
        np.copyto(self._room[: shared.size], shared)
        return self._room[: shared.size]

    def state(self) -> int:
        """Return the stamp of the value that was returned last."""
        return self._seen

    def load(self, state: int) -> None:
        """Continue as if the value of that stamp had been returned."""
        self._seen = state


def _slot_cells(cells: Cells, slot: int) -> Cells:
    begin = _SLOTS + 4 * slot
    return cells[begin : begin + 4]


def _word_sum(buffer: Buffer) -> int:
    """Return a checksum at the speed of memory: a copy that mixes two values has another sum."""
    return int(buffer.view(np.int64).sum())
