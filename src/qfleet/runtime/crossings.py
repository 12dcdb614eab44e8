"""Edges between two nodes: each has its part in its own shared memory, and the receiving one asks for what is new.

Knows nothing of what carries questions and parcels. Either may be lost, late or doubled: messages are numbered, values
stamped, questions counted. A slot is given back to a sender only when the receiving role has acknowledged its message.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qfleet.runtime import framing
from qfleet.runtime.bells import Bell
from qfleet.runtime.channels import edge_stem
from qfleet.runtime.framing import Buffer, Sealed
from qfleet.runtime.graph import Graph, ends
from qfleet.runtime.latest import LatestPublisher, LatestSubscriber
from qfleet.runtime.memory import attach
from qfleet.runtime.streams import CLOSED, SENT, TAKEN, Ring

_LOOK_S = 0.02
"""How often latest values, which ring no bell, are looked at."""
_COUNT_S = 0.1
"""How old what one node knows of another's counters may get."""


@dataclass(frozen=True)
class Imports:
    """What one node gets from another."""

    streams: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    cells: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of each counter, the writers whose parts come from there."""


@dataclass(frozen=True)
class Question:
    """What a node has and wants."""

    number: int
    """Counts the questions of one node to another."""
    streams: dict[str, tuple[int, int, bool]]
    """The first message that is wanted, how many were taken, and whether it is known to be closed."""
    values: dict[str, int]
    """The stamp of the value that is there."""
    cells: dict[str, list[int]]
    """What is known of the other's parts of counters."""


@dataclass(frozen=True)
class Parcel:
    """What came of a question."""

    heeded: bool
    """Whether it was the newest; an older one gets no messages."""
    streams: dict[str, tuple[int, list[Buffer], bool]]
    """The number of the first message, the messages, and whether the stream is closed after them."""
    values: dict[str, tuple[int, Any]]
    """Stamp and frame; a carrier may put something in a frame's place that it is fetched by."""
    cells: dict[str, list[int]]


@dataclass(frozen=True)
class Map:
    """What crosses which border; nodes by name."""

    imports: Mapping[str, Mapping[str, Imports]]
    """Of each node, by the node that it comes from."""
    exports: Mapping[str, Mapping[str, Imports]]
    """Of each node, by the node that it goes to."""
    edges: Mapping[str, set[str]]
    """The streams and latest values that have an end on each node."""


def draw_map(graph: Graph, homes: Mapping[str, str], here: str) -> Map:
    """Return what crosses borders when roles are on these nodes, and the caller `here`.

    What others count is exchanged with the caller's node, which knows all of it.
    """
    held = {(e.edge, e.side, e.reader): homes[node.name] for node in graph.nodes for e in ends(node.handles)}
    nodes = {here, *homes.values()}
    pairs = [(to, source) for to in nodes for source in nodes if to != source]
    streams = {
        edge: (held.get((edge, "sender", 0), here), held.get((edge, "receiver", 0), here)) for edge in graph.streams
    }
    values = {
        edge: (
            held.get((edge, "publisher", 0), here),
            {held.get((edge, "subscriber", r), here) for r in range(readers)},
        )
        for edge, readers in graph.latest_values.items()
    }

    def counted(to: str, source: str) -> dict[str, tuple[int, ...]]:
        writers = {edge: [held.get((edge, "counter", w), here) for w in range(n)] for edge, n in graph.counters.items()}
        if to == here:
            return {edge: tuple(w for w, at in enumerate(own) if at == source) for edge, own in writers.items()}
        return {edge: tuple(w for w, at in enumerate(own) if at != to) for edge, own in writers.items()}

    imports: dict[str, dict[str, Imports]] = {node: {} for node in nodes}
    for to, source in pairs:
        one = Imports(
            tuple(edge for edge, ends_at in streams.items() if ends_at == (source, to)),
            tuple(edge for edge, (shown, seen) in values.items() if shown == source and to in seen),
            counted(to, source) if here in (to, source) else {},
        )
        if one.streams or one.values or any(one.cells.values()):
            imports[to][source] = one
    exports = {node: {to: gets[node] for to, gets in imports.items() if node in gets} for node in nodes}
    edges = {
        node: {edge for edge, at in streams.items() if node in at}
        | {edge for edge, (shown, seen) in values.items() if node in (shown, *seen)}
        for node in nodes
    }
    return Map(imports, exports, edges)


class Exit:
    """The part of a stream on its sender's node."""

    def __init__(self, stem: Path) -> None:
        self._ring, self.bell = Ring(stem), Bell(stem, "receiver")

    def credit(self, taken: int) -> None:
        """Note how many messages the receiving role has taken; fewer than none when a restored run has some waiting."""
        if self._ring.cells[TAKEN] != taken:
            self._ring.cells[TAKEN] = taken
            self.bell.ring()

    def news(self, first: int, closed: bool) -> bool:
        """Return whether there is a message from a number on, or an end that is not known."""
        return bool(self._ring.cells[SENT] > first or (self._ring.cells[CLOSED] and not closed))

    def messages(self, first: int) -> tuple[int, list[Buffer], bool]:
        """Return copies of all messages from a number on."""
        closed = bool(self._ring.cells[CLOSED])  # first: what was sent before is then all there
        sent = int(self._ring.cells[SENT])
        return first, [framing.copy(self._ring.frame(number)) for number in range(first, sent)], closed


class Entry:
    """The part of a stream on its receiver's node; `first` is the number of the first message that comes here."""

    def __init__(self, stem: Path, first: int = 0) -> None:
        self._ring, self.bell = Ring(stem), Bell(stem, "sender")
        self._fetched = first
        """How many messages have left the other node; a restored run has others here besides."""

    def standing(self) -> tuple[int, int, bool]:
        """Return the number of the next message, how many were taken, as the sender counts, and whether it ended."""
        return self._fetched, self._fetched - self._waiting(), bool(self._ring.cells[CLOSED])

    def take(self, first: int, frames: list[Buffer], closed: bool) -> None:
        """Append what is new and finds room."""
        cells = self._ring.cells
        fresh = frames[self._fetched - first :] if first <= self._fetched else []
        taken = fresh[: self._ring.capacity - self._waiting()]
        for frame in taken:
            self._ring.write(int(cells[SENT]), Sealed(frame))
            cells[SENT] += 1
            self._fetched += 1
        end = closed and self._fetched == first + len(frames) and not cells[CLOSED]
        if end:
            cells[CLOSED] = 1
        if taken or end:
            self.bell.ring()

    def _waiting(self) -> int:
        return int(self._ring.cells[SENT] - self._ring.cells[TAKEN])


class Depot:
    """All that crosses the border of one node, in `folder`; `imports` and `exports` say what, by the other node.

    Streams that were used before begin with the message whose number is in `begun`.
    """

    def __init__(
        self,
        folder: Path,
        imports: Mapping[str, Imports],
        exports: Mapping[str, Imports],
        begun: Mapping[str, int] | None = None,
    ) -> None:
        self._imports, self._exports = imports, exports
        self._lock = threading.Lock()
        coming = [edge for one in imports.values() for edge in one.streams]
        self.entries = {edge: Entry(edge_stem(folder, edge), (begun or {}).get(edge, 0)) for edge in coming}
        self._exits = {edge: Exit(edge_stem(folder, edge)) for one in exports.values() for edge in one.streams}
        self._shown = {
            edge: LatestPublisher(edge_stem(folder, edge)) for one in imports.values() for edge in one.values
        }
        self._seen = {
            edge: LatestSubscriber(edge_stem(folder, edge)) for one in exports.values() for edge in one.values
        }
        counters = {edge for one in [*imports.values(), *exports.values()] for edge in one.cells}
        self._cells = {edge: attach(edge_stem(folder, edge)).view(np.int64) for edge in counters}
        self._asked, self._answered = (dict.fromkeys({*imports, *exports}, 0) for _ in range(2))
        """By node: the last question to it, and the last one of it."""

    def let_go(self, edges: Collection[str]) -> None:
        """Exchange nothing more of some streams: the roles that used them here or there are elsewhere now."""
        with self._lock:
            for edge in edges:
                self.entries.pop(edge, None)
                self._exits.pop(edge, None)

    def question(self, source: str) -> Question:
        """Return what to ask another node."""
        imports = self._imports[source]
        with self._lock:
            self._asked[source] += 1
            return Question(
                self._asked[source],
                {edge: self.entries[edge].standing() for edge in imports.streams if edge in self.entries},
                {edge: self._shown[edge].newest() for edge in imports.values},
                self._parts(imports),
            )

    def answer(self, asker: str, question: Question) -> Parcel:
        """Return what another node has not got yet."""
        exports = self._exports[asker]
        with self._lock:
            streams, heeded = {}, question.number >= self._answered[asker]
            if heeded:  # what an older one asks for may be gone
                self._answered[asker] = question.number
                for edge, (first, taken, _) in self._known(question).items():
                    self._exits[edge].credit(taken)
                    streams[edge] = self._exits[edge].messages(first)
            values = {edge: self._seen[edge].sealed() for edge in self._newer(question)}
            fresh = {edge: found for edge, found in values.items() if found is not None}
            return Parcel(heeded, streams, fresh, self._parts(exports))

    def take_in(self, source: str, parcel: Parcel) -> None:
        """Put what came to where the roles of this node find it."""
        with self._lock:
            for edge, (first, frames, closed) in parcel.streams.items():
                if edge in self.entries:
                    self.entries[edge].take(first, frames, closed)
            for edge, (stamp, frame) in parcel.values.items():
                if stamp > self._shown[edge].newest():
                    self._shown[edge].place(Sealed(frame), stamp)
            for edge, parts in parcel.cells.items():
                writers = list(self._imports[source].cells[edge])
                self._cells[edge][writers] = np.maximum(self._cells[edge][writers], parts)  # parcels may be late

    def wait(self, asker: str, question: Question, seconds: float) -> None:
        """Wait until there is an answer to a question, at most so long."""
        with self._lock:
            exits = [self._exits[edge] for edge in self._known(question)]
        poll = select.poll()
        for each in exits:
            poll.register(each.bell, select.POLLIN)
        began = time.monotonic()
        while (waited := time.monotonic() - began) < seconds:
            for each in exits:
                each.bell.silence()
            with self._lock:
                known = self._known(question)
                sent = any(self._exits[edge].news(first, end) for edge, (first, _, end) in known.items())
                counted = waited > _COUNT_S and self._parts(self._exports[asker]) != question.cells
                if sent or counted or self._newer(question):
                    return
            poll.poll(1e3 * _LOOK_S)

    def _known(self, question: Question) -> dict[str, tuple[int, int, bool]]:
        """Return those streams of a question that still go there from here."""
        return {edge: asked for edge, asked in question.streams.items() if edge in self._exits}

    def _newer(self, question: Question) -> list[str]:
        """Return the values that are newer than those of a question."""
        return [edge for edge, stamp in question.values.items() if self._seen[edge].newest() > stamp]

    def _parts(self, counted: Imports) -> dict[str, list[int]]:
        return {edge: [int(self._cells[edge][writer]) for writer in writers] for edge, writers in counted.cells.items()}
