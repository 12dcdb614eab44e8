"""A bounded stream in shared memory: a ring of slots between two cursors that outlive either end; pipes only ring.

Each cursor is written by one side alone, and last of all. A message stays in its slot until it is acknowledged, so an
end that is opened anew goes on where its predecessor died: the sender at `sent`, the receiver at `taken`. That a
receiver has left, or that nothing shall be sent for now, is written by the supervisor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import CheckpointError, QfleetError
from qfleet.core.failpoints import failpoint
from qfleet.runtime import framing
from qfleet.runtime.bells import Bell, create_bells
from qfleet.runtime.framing import Buffer, Frame, Sealed
from qfleet.runtime.memory import NoRoom, SlotReader, SlotWriter, attach, create

Cells = NDArray[np.int64]

SENT, CLOSED, TAKEN, _DESERTED, _LOADED, _HELD, _SLOTS = 0, 1, 8, 9, 10, 11, 16
"""Where the cells begin; the two sides write to different cache lines."""
_NUMBER, _GENERATION, _NBYTES, _SLOT_CELLS = range(4)
"""Of a slot: which message it holds (from 1), the generation of its file, and the bytes used."""


def create_stream(stem: Path, capacity: int) -> None:
    """Make the cells and bells of an empty stream."""
    create(stem, 8 * (_SLOTS + _SLOT_CELLS * capacity))
    create_bells(stem)


@dataclass(frozen=True)
class Level:
    """How many messages of a stream were sent and taken so far."""

    edge: str
    sent: int
    taken: int
    capacity: int


def read_level(edge: str, cells: Cells) -> Level:
    """Return how a stream stands, from its cells."""
    return Level(edge, int(cells[SENT]), int(cells[TAKEN]), (cells.size - _SLOTS) // _SLOT_CELLS)


def desert(stem: Path, deserted: bool = True) -> None:
    """Let the sender know that nobody will receive its messages, or that somebody does again."""
    attach(stem).view(np.int64)[_DESERTED] = deserted


def hold(stem: Path, more: int | None) -> None:
    """Let the stream seem full to its sender after so many further messages; None ends that."""
    cells = attach(stem).view(np.int64)
    cells[_HELD] = 0 if more is None else cells[SENT] + more + 1


def reopen(stem: Path) -> int:
    """Let a receiver that was on another node go on with what its sender still has; returns the first such message."""
    cells = attach(stem).view(np.int64)
    cells[TAKEN] = max(int(cells[TAKEN]), 0)  # less where messages of a restored run waited there
    return int(cells[TAKEN])


def catch_up(stem: Path, peer: Path) -> None:
    """Let a receiver whose acknowledgements were lost leave out what its peer, who gets the same, has taken.

    Both were sent the same number of messages lately, perhaps but for the last one.
    """
    cells, other = attach(stem).view(np.int64), attach(peer).view(np.int64)
    cells[TAKEN] = max(cells[TAKEN], cells[SENT] - (other[SENT] - other[TAKEN]))


class Ring:
    """What both ends of a stream see: the cursors and the slots."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self.cells: Cells = attach(stem).view(np.int64)
        self.capacity = (self.cells.size - _SLOTS) // _SLOT_CELLS
        self._writers: dict[int, SlotWriter] = {}
        self._readers: dict[int, SlotReader] = {}

    def write(self, number: int, frame: Frame | Sealed) -> None:
        """Fill the slot of message `number`, from 0."""
        slot, cells = self._slot(number)
        writer = self._writers.get(slot)
        if writer is None or writer.generation != cells[_GENERATION]:  # restoring wrote from the other side
            writer = self._writers[slot] = SlotWriter(self._slot_stem(slot), int(cells[_GENERATION]))
        written = writer.write(frame)
        cells[_GENERATION], cells[_NBYTES] = writer.generation, written.size
        cells[_NUMBER] = number + 1

    def read(self, number: int, views: bool) -> Any:
        """Return message `number`, its arrays as they lie in the slot, or else copied."""
        frame = self.frame(number)
        return framing.read(frame if views else framing.copy(frame))

    def frame(self, number: int) -> Buffer:
        """Return message `number` as it lies in its slot."""
        slot, cells = self._slot(number)
        if cells[_NUMBER] != number + 1:
            raise RuntimeError(f"slot {slot} of {self._stem.name} holds message {cells[_NUMBER] - 1}, not {number}")
        reader = self._readers.get(slot)
        if reader is None:
            reader = self._readers[slot] = SlotReader(self._slot_stem(slot))
        return reader.view(int(cells[_GENERATION]), int(cells[_NBYTES]))

    def _slot(self, number: int) -> tuple[int, Cells]:
        slot = number % self.capacity
        begin = _SLOTS + _SLOT_CELLS * slot
        return slot, self.cells[begin : begin + _SLOT_CELLS]

    def _slot_stem(self, slot: int) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{slot}")


class StreamSender:
    """The sending end of a bounded stream."""

    def __init__(self, stem: Path, setting: str = "") -> None:
        self._bell, self._setting = Bell(stem, "sender"), setting
        self._ring = Ring(stem)
        self._cells = self._ring.cells

    def waitable(self) -> Any:
        """Return what becomes readable when a slot is given back."""
        return self._bell.waitable()

    def ready(self) -> bool:
        """Return whether one more message fits, and none is held back."""
        held = int(self._cells[_HELD])  # one more than the messages that may be sent in all, if it is not 0
        return self.state() < self._ring.capacity and (not held or self.sent() < held - 1)

    def send(self, message: Any) -> None:
        """Copy a message into the next slot, then move the cursor over it."""
        if self.state() >= self._ring.capacity:  # held or not: its sender may have asked before
            raise RuntimeError("sent into a full stream: ask ready() first")
        number = int(self._cells[SENT])
        failpoint("channel.before_send")
        try:
            self._ring.write(number, Frame(message))
        except NoRoom as error:
            raise QfleetError(error.told("one more message", self._setting)) from error
        failpoint("channel.after_write")
        self._cells[SENT] = number + 1
        self._bell.ring()
        failpoint("channel.after_send")

    def close(self) -> None:
        """Say that no further message will come."""
        self._cells[CLOSED] = 1
        self._bell.ring()

    def sent(self) -> int:
        """Return how many messages were sent here in all lives of the role."""
        return int(self._cells[SENT])

    def deserted(self) -> bool:
        """Return whether whoever received here has left the run for good."""
        return bool(self._cells[_DESERTED])

    def state(self) -> int:
        """Return how many messages are not acknowledged."""
        return int(self._cells[SENT] - self._cells[TAKEN])

    def load(self, state: int) -> None:
        """Do nothing: the receiver brings the messages and both cursors back."""


class StreamReceiver:
    """The receiving end of a bounded stream.

    With `views` arrays lie in the slot, until they are acknowledged; without `hold` they are acknowledged at once.
    """

    def __init__(self, stem: Path, views: bool = False, hold: bool = True) -> None:
        self._bell = Bell(stem, "receiver")
        self._ring = Ring(stem)
        self._cells = self._ring.cells
        self._views, self._hold = views and hold, hold
        self._taken = self._next = int(self._cells[TAKEN])

    def waitable(self) -> Any:
        """Return what becomes readable when a message comes."""
        return self._bell.waitable()

    def receive(self) -> Any | None:
        """Return the next message, or None."""
        if not self._waiting():
            return None
        message = self._ring.read(self._next, self._views)
        self._next += 1
        if not self._hold:
            self.acknowledge()
        return message

    def exhausted(self) -> bool:
        """Return whether the sender closed the stream and nothing is left of it."""
        closed = bool(self._cells[CLOSED])  # first: what was sent before is then all there
        return closed and not self._waiting()

    def acknowledge(self) -> None:
        """Give the slots of all received messages back; whoever opens this end anew will not see them."""
        if self._taken != self._next:
            failpoint("channel.before_ack")
            self._cells[TAKEN] = self._taken = self._next
            self._bell.ring()

    def state(self) -> list[Any]:
        """Return the messages that were sent and not received; all roles are paused."""
        return [self._ring.read(number, views=False) for number in range(self._next, int(self._cells[SENT]))]

    def load(self, state: list[Any]) -> None:
        """Continue with messages that a former run left here; what was sent while roles were built comes after them.

        Once: a role that dies while its run is restored is told to do so again, and would find its messages twice.
        """
        if self._cells[_LOADED]:
            return
        capacity = self._ring.capacity
        if len(state) > capacity:
            raise CheckpointError(f"a stream of capacity {capacity} cannot take up {len(state)} messages that waited")
        messages = (state + self.state())[:capacity]
        for number, message in enumerate(messages, self._next):
            self._ring.write(number, Frame(message))
        self._cells[SENT] = self._next + len(messages)
        self._cells[_LOADED] = 1
        self._bell.ring()

    def _waiting(self) -> bool:
        return bool(self._cells[SENT] > self._next)
