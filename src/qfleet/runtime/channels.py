"""Edges between processes of one machine: bulk data in memory-mapped slots, 16-byte tokens over socket pairs."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError
from qfleet.core.role import State
from qfleet.runtime import framing
from qfleet.runtime.framing import Buffer, Frame
from qfleet.runtime.graph import End, Graph, ends
from qfleet.runtime.memory import SlotReader, SlotWriter, attach, create

Cells = NDArray[np.int64]

_TOKEN = struct.Struct("<iiq")
"""Slot, generation of its file, bytes used. A credit is a token too, of which only the slot counts."""
_CLOSE = -1
_LARGEST_CAPACITY = 256
"""A socket pair takes 278 unread tokens before a send would block (Linux, default buffers)."""
_READ_ATTEMPTS = 20


class Line:
    """A socket that carries tokens and never blocks; a dead peer makes it silent, the supervisor names the death."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self.lost = False

    def put(self, slot: int, generation: int = 0, nbytes: int = 0) -> None:
        """Send one token; the capacity of a stream bounds how many are on their way."""
        try:
            self._connection.send(_TOKEN.pack(slot, generation, nbytes), socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError):
            self.lost = True

    def take(self) -> Iterator[tuple[int, int, int]]:
        """Return the tokens that have come."""
        try:
            data = self._connection.recv(_TOKEN.size * 2 * _LARGEST_CAPACITY, socket.MSG_DONTWAIT)
            self.lost = not data
        except BlockingIOError:
            return iter(())
        except ConnectionResetError:
            self.lost = True
            return iter(())
        data = self._rest + data
        whole = len(data) - len(data) % _TOKEN.size
        self._rest = data[whole:]
        return _TOKEN.iter_unpack(data[:whole])

    def waitable(self) -> socket.socket | None:
        """Return what becomes readable when a token comes; None when none ever will."""
        return None if self.lost else self._connection

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()


class StreamSender:
    """The sending end of a bounded stream: one slot for each credit."""

    def __init__(self, line: Line, stem: Path, capacity: int) -> None:
        self._line = line
        self._stem = stem
        self._capacity = capacity
        self._free = list(range(capacity))
        self._slots: dict[int, SlotWriter] = {}
        self._closed = False

    def waitable(self) -> Any:
        """Return what becomes readable when a credit comes back."""
        return self._line.waitable()

    def ready(self) -> bool:
        """Return whether one more message fits."""
        if not self._free:
            self._free.extend(slot for slot, _, _ in self._line.take())
        return bool(self._free) and not self._line.lost

    def send(self, message: Any) -> None:
        """Copy a message into a free slot and tell the receiver."""
        if not self.ready():
            raise RuntimeError("sent into a full stream: ask ready() first")
        slot = self._free.pop()
        writer = self._slots.setdefault(slot, SlotWriter(self._stem.with_name(f"{self._stem.name}.{slot}")))
        written = writer.write(Frame(message))
        self._line.put(slot, writer.generation, written.size)

    def close(self) -> None:
        """Say that no further message will come."""
        if not self._closed:
            self._closed = True
            self._line.put(_CLOSE)

    def state(self) -> int:
        """Return how many messages the receiver has not taken; all roles are paused."""
        self._free.extend(slot for slot, _, _ in self._line.take())
        return self._capacity - len(self._free)

    def load(self, state: int) -> None:
        """Continue with so many messages waiting at the receiver: they hold the first slots."""
        self._free = list(range(state, self._capacity))


class StreamReceiver:
    """The receiving end of a bounded stream."""

    def __init__(self, line: Line, stem: Path) -> None:
        self._line = line
        self._stem = stem
        self._slots: dict[int, SlotReader] = {}
        self._arrived: deque[tuple[int, int, int]] = deque()
        self._restored: deque[Any] = deque()
        self._closed = False

    def waitable(self) -> Any:
        """Return what becomes readable when a message comes."""
        return self._line.waitable()

    def receive(self) -> Any | None:
        """Return the next message, or None; its slot goes back to the sender."""
        if self._restored:
            slot, message = self._restored.popleft()
            self._line.put(slot)
            return message
        if not self._arrived:
            self._look()
        if not self._arrived:
            return None
        token = self._arrived.popleft()
        message = self._read(*token)
        self._line.put(token[0])
        return message

    def exhausted(self) -> bool:
        """Return whether the sender closed the stream and nothing is left of it."""
        if self._arrived or self._restored:
            return False
        self._look()
        return self._closed and not self._arrived

    def state(self) -> list[Any]:
        """Return the messages that are here and not taken; all roles are paused."""
        self._look()
        return [message for _, message in self._restored] + [self._read(*token) for token in self._arrived]

    def load(self, state: list[Any]) -> None:
        """Continue with messages that a former run left here."""
        self._restored = deque(enumerate(state))

    def _look(self) -> None:
        for token in self._line.take():
            if token[0] == _CLOSE:
                self._closed = True
            else:
                self._arrived.append(token)

    def _read(self, slot: int, generation: int, nbytes: int) -> Any:
        reader = self._slots.setdefault(slot, SlotReader(self._stem.with_name(f"{self._stem.name}.{slot}")))
        return framing.read(reader.read(generation, nbytes))


_NEWEST, _SLOTS = 0, 1
"""Where a latest value's cells begin: the newest stamp, then four cells for each of its two slots."""
_STAMP, _GENERATION, _NBYTES, _SUM = range(4)


class LatestPublisher:
    """The writing end of a latest value: writes the slot that readers are not sent to, then sends them there."""

    def __init__(self, stem: Path) -> None:
        self._cells = _attach_cells(stem)
        self._reader = LatestSubscriber(stem)
        self._writers = [
            SlotWriter(stem.with_name(f"{stem.name}.{slot}"), int(_slot_cells(self._cells, slot)[_GENERATION]))
            for slot in (0, 1)
        ]

    def publish(self, message: Any) -> None:
        """Replace the value."""
        self._publish(message, int(self._cells[_NEWEST]) + 1)

    def state(self) -> State:
        """Return the value and its stamp."""
        return {"stamp": int(self._cells[_NEWEST]), "value": self._reader.peek()}

    def load(self, state: State) -> None:
        """Continue with a former value under its stamp."""
        if state["stamp"]:
            self._publish(state["value"], state["stamp"])

    def _publish(self, message: Any, stamp: int) -> None:
        slot = stamp % 2
        cells = _slot_cells(self._cells, slot)
        cells[_STAMP] = 0  # a reader that is still in this slot sees that its copy may be torn
        written = self._writers[slot].write(Frame(message))
        cells[_GENERATION], cells[_NBYTES] = self._writers[slot].generation, written.size
        cells[_SUM] = _word_sum(written)
        cells[_STAMP] = stamp
        self._cells[_NEWEST] = stamp


class LatestSubscriber:
    """A reading end of a latest value: takes no lock, and takes no copy for whole that is not."""

    def __init__(self, stem: Path) -> None:
        self._cells = _attach_cells(stem)
        self._readers = [SlotReader(stem.with_name(f"{stem.name}.{slot}")) for slot in (0, 1)]
        self._seen = 0

    def waitable(self) -> None:
        """Nothing to wait on: a reader of a latest value gives a deadline."""

    def latest(self) -> Any | None:
        """Return the newest value if it was not returned before; None also when it is being replaced right now."""
        return None if self._cells[_NEWEST] == self._seen else self.peek()

    def peek(self) -> Any | None:
        """Return the newest value even if it was returned before."""
        for _ in range(_READ_ATTEMPTS):
            stamp = int(self._cells[_NEWEST])
            buffer = self._copy(stamp)
            if buffer is not None:
                self._seen = stamp
                return framing.read(buffer)
        return None

    def _copy(self, stamp: int) -> Buffer | None:
        cells = _slot_cells(self._cells, stamp % 2)
        found, generation, nbytes, total = (int(cell) for cell in cells)
        if found != stamp or stamp == 0:
            return None
        try:
            buffer = self._readers[stamp % 2].read(generation, nbytes)
        except FileNotFoundError:  # outgrown and replaced since
            return None
        whole = cells[_STAMP] == stamp and _word_sum(buffer) == total
        return buffer if whole else None

    def state(self) -> int:
        """Return the stamp of the value that was returned last."""
        return self._seen

    def load(self, state: int) -> None:
        """Continue as if the value of that stamp had been returned."""
        self._seen = state


class SharedCounter:
    """One writer's cell of a run-wide counter; nobody else writes it, so no lock is needed."""

    def __init__(self, stem: Path, writer: int) -> None:
        self._cells = _attach_cells(stem)
        self._writer = writer

    def add(self, amount: int) -> None:
        """Add to this writer's cell."""
        self._cells[self._writer] += amount

    def total(self) -> int:
        """Return the sum over all writers."""
        return int(self._cells.sum())

    def state(self) -> int:
        """Return this writer's part."""
        return int(self._cells[self._writer])

    def load(self, state: int) -> None:
        """Continue from this writer's former part."""
        self._cells[self._writer] = state


def _attach_cells(stem: Path) -> Cells:
    return attach(stem).view(np.int64)


def _slot_cells(cells: Cells, slot: int) -> Cells:
    begin = _SLOTS + 4 * slot
    return cells[begin : begin + 4]


def _word_sum(buffer: Buffer) -> int:
    """Return a checksum at the speed of memory: a copy that mixes two values has another sum."""
    return int(buffer.view(np.int64).sum())


@dataclass
class Ports:
    """What one process needs to open its ends: the run's folder and its sockets; can be sent to a new process."""

    folder: Path
    sockets: dict[tuple[str, str], socket.socket] = field(default_factory=dict)
    """By edge and side."""

    def open(self, end: End) -> Any:
        """Return the live handle of an end."""
        stem = edge_stem(self.folder, end.edge)
        if end.side in ("sender", "receiver"):
            line = Line(self.sockets[end.edge, end.side])
            return StreamSender(line, stem, end.capacity) if end.side == "sender" else StreamReceiver(line, stem)
        if end.side == "counter":
            return SharedCounter(stem, end.reader)
        return LatestPublisher(stem) if end.side == "publisher" else LatestSubscriber(stem)

    def close(self) -> None:
        """Close the sockets."""
        for connection in self.sockets.values():
            connection.close()


def lay_out(graph: Graph, folder: Path) -> tuple[dict[str, Ports], Ports]:
    """Make the files and sockets of all edges; returns the ports of every node by name, and the caller's."""
    ports = {node.name: Ports(folder) for node in graph.nodes}
    caller = Ports(folder)
    holders: dict[tuple[str, str], str] = {
        (end.edge, end.side): node.name for node in graph.nodes for end in ends(node.handles)
    }
    for edge, capacity in graph.streams.items():
        if not 1 <= capacity <= _LARGEST_CAPACITY:
            raise ConfigError(f"stream '{edge}': a capacity of {capacity} is not within 1 to {_LARGEST_CAPACITY}")
        for side, connection in zip(("sender", "receiver"), socket.socketpair(), strict=True):
            holder = holders.get((edge, side))
            (ports[holder] if holder else caller).sockets[edge, side] = connection
    for edge in graph.latest_values:
        create(edge_stem(folder, edge), 8 * (_SLOTS + 2 * 4))
    for edge in graph.counters:
        create(edge_stem(folder, edge), 8 * graph.counters[edge])
    return ports, caller


def edge_stem(folder: Path, edge: str) -> Path:
    """Return the path whose name all files of an edge begin with."""
    return folder / quote(edge, safe="")
