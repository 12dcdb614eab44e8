"""Edges between roles that reach each other by calls, which may come late or twice: numbered, bounded, acknowledged.

Knows nothing of what carries the calls. Each end is used by its role's thread, and told of news by another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qfleet.core.role import State
from qfleet.runtime import framing
from qfleet.runtime.framing import Buffer, Frame
from qfleet.runtime.graph import End, Graph, ends
from qfleet.runtime.keeps import LocalKeep

CALLER = "caller"
"""The holder of all ends that no role holds."""

Post = Callable[..., None]
"""Calls `MailRoom` method `name` of a holder, as `post(holder, name, *arguments)`, and does not wait for it."""


@dataclass
class Routes:
    """Who holds which end; computed once from the graph."""

    ends: dict[str, list[End]]
    """The ends of each holder."""
    holders: dict[tuple[str, str, int], str] = field(init=False)
    """The holder by edge, side and reader."""

    def __post_init__(self) -> None:
        self.holders = {(e.edge, e.side, e.reader): holder for holder, own in self.ends.items() for e in own}

    def subscribers(self, edge: str) -> dict[int, str]:
        """Return the holders of all reading ends of a latest value, by reader."""
        return {
            reader: who for (name, side, reader), who in self.holders.items() if (name, side) == (edge, "subscriber")
        }


def find_routes(graph: Graph) -> Routes:
    """Return who holds which end: a node, or else the caller."""
    routes = Routes({node.name: [e for e in ends(node.handles) if e.side != "keep"] for node in graph.nodes})
    drawn: list[End] = []
    for edge, capacity in graph.streams.items():
        drawn += [End(edge, "sender", capacity), End(edge, "receiver", capacity)]
    for edge, readers in graph.latest_values.items():
        drawn += [End(edge, "publisher"), *(End(edge, "subscriber", reader=r) for r in range(readers))]
    drawn += [End(edge, "counter", reader=w) for edge, writers in graph.counters.items() for w in range(writers)]
    rest = [end for end in drawn if (end.edge, end.side, end.reader) not in routes.holders]
    return Routes({**routes.ends, CALLER: rest})


class MailSender:
    """The sending end of a bounded stream; a message is on its way until the receiver's role has taken it."""

    def __init__(self, capacity: int, deliver: Callable[[int, Buffer | None], None]) -> None:
        self._capacity = capacity
        self._deliver = deliver
        self._sent = 0
        self._closed = False
        self.taken = 0

    def waitable(self) -> None:
        """Nothing to wait on: any news ends a wait."""

    def ready(self) -> bool:
        """Return whether one more message fits."""
        return self._sent - self.taken < self._capacity

    def send(self, message: Any) -> None:
        """Send one message under the next number."""
        if not self.ready():
            raise RuntimeError("sent into a full stream: ask ready() first")
        self._deliver(self._sent, Frame(message).to_buffer())
        self._sent += 1

    def close(self) -> None:
        """Say that no further message will come."""
        if not self._closed:
            self._closed = True
            self._deliver(self._sent, None)

    def sent(self) -> int:
        """Return how many messages were sent here."""
        return self._sent

    def deserted(self) -> bool:
        """Return False: a role that dies here ends the run."""
        return False

    def state(self) -> int:
        """Return how many messages the receiver has not taken; all roles are paused."""
        return self._sent - self.taken

    def load(self, state: int) -> None:
        """Continue with so many messages waiting at the receiver."""
        self._sent, self.taken = state, 0


class MailReceiver:
    """The receiving end of a bounded stream; puts messages in order and drops what comes twice."""

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        self._acknowledge = acknowledge
        self._arrived: dict[int, Buffer | None] = {}
        self._next = 0

    def waitable(self) -> None:
        """Nothing to wait on: any news ends a wait."""

    def put(self, sequence: int, frame: Buffer | None) -> None:
        """Take in a message, or the end of the stream (None)."""
        if sequence >= self._next:
            self._arrived.setdefault(sequence, frame)

    def receive(self) -> Any | None:
        """Return the next message, or None."""
        frame = self._arrived.get(self._next)
        if frame is None:
            return None
        self._next += 1  # first, so that a repeated delivery is known as one
        del self._arrived[self._next - 1]
        self._acknowledge(self._next)
        return framing.read(framing.copy(frame))

    def exhausted(self) -> bool:
        """Return whether the sender closed the stream and nothing is left of it."""
        return self._next in self._arrived and self._arrived[self._next] is None

    def acknowledge(self) -> None:
        """Do nothing: a role that dies here is not begun anew, so a message is taken when it is received."""

    def state(self) -> list[Any]:
        """Return the messages that are here and not taken; all roles are paused."""
        waiting = [frame for _, frame in sorted(self._arrived.items()) if frame is not None]
        return [framing.read(framing.copy(frame)) for frame in waiting]

    def load(self, state: list[Any]) -> None:
        """Continue with messages that a former run left here."""
        self._next = 0
        self._arrived = {sequence: Frame(message).to_buffer() for sequence, message in enumerate(state)}


class MailPublisher:
    """The writing end of a latest value; at most one value is on its way to each subscriber."""

    def __init__(self, readers: Sequence[int], share: Callable[[Buffer], Any], update: Callable[..., None]) -> None:
        self._share = share
        self._update = update
        self._lock = threading.Lock()
        self._stamp = 0
        self._buffer: Buffer | None = None
        self._shared: Any = None
        self._on_its_way = dict.fromkeys(readers, 0)
        """The stamp that each reader has not confirmed; 0 if none."""

    def publish(self, message: Any) -> None:
        """Replace the value."""
        self._publish(message, self._stamp + 1)

    def _publish(self, message: Any, stamp: int) -> None:
        buffer = Frame(message).to_buffer()
        shared = self._share(buffer)
        with self._lock:
            self._stamp, self._buffer, self._shared = stamp, buffer, shared
            for reader, stamp_on_its_way in self._on_its_way.items():
                if not stamp_on_its_way:
                    self._send(reader)

    def confirm(self, reader: int, stamp: int) -> None:
        """Note that a reader has a value; send it the newest if that is another."""
        with self._lock:
            if self._on_its_way[reader] == stamp:
                self._on_its_way[reader] = 0
                if stamp < self._stamp:
                    self._send(reader)

    def _send(self, reader: int) -> None:
        self._on_its_way[reader] = self._stamp
        self._update(reader, self._stamp, self._shared)

    def state(self) -> State:
        """Return the value and its stamp."""
        value = None if self._buffer is None else framing.read(framing.copy(self._buffer))
        return {"stamp": self._stamp, "value": value}

    def load(self, state: State) -> None:
        """Continue with a former value under its stamp."""
        if state["stamp"]:
            self._publish(state["value"], state["stamp"])


class MailSubscriber:
    """A reading end of a latest value."""

    def __init__(self) -> None:
        self._newest: tuple[int, Buffer | None] = (0, None)
        self._seen = 0

    def waitable(self) -> None:
        """Nothing to wait on: any news ends a wait."""

    def put(self, stamp: int, frame: Buffer) -> None:
        """Take in a value."""
        self._newest = max(self._newest, (stamp, frame), key=lambda pair: pair[0])

    def latest(self) -> Any | None:
        """Return the newest value if it was not returned before."""
        stamp, frame = self._newest
        if frame is None or stamp <= self._seen:
            return None
        self._seen = stamp
        return framing.read(framing.copy(frame))

    def state(self) -> int:
        """Return the stamp of the value that was returned last."""
        return self._seen

    def load(self, state: int) -> None:
        """Continue as if the value of that stamp had been returned."""
        self._seen = state


class MailCounter:
    """One writer's cell of a run-wide counter, and what is known of the others'."""

    def __init__(self) -> None:
        self._own = 0
        self.others = 0

    def add(self, amount: int) -> None:
        """Add to this writer's cell."""
        self._own += amount

    def own(self) -> int:
        """Return what this writer's cell holds."""
        return self._own

    def total(self) -> int:
        """Return the sum over all writers, as far as it is known here."""
        return self._own + self.others

    def state(self) -> int:
        """Return this writer's part."""
        return self._own

    def load(self, state: int) -> None:
        """Continue from this writer's former part."""
        self._own = state


class MailRoom:
    """All ends of one holder, and the methods that its peers call."""

    def __init__(self, holder: str, routes: Routes, post: Post, share: Callable[[Buffer], Any]) -> None:
        self._routes, self._post, self._share = routes, post, share
        self._ends = {(end.edge, end.side, end.reader): self._make(end) for end in routes.ends[holder]}
        self._board: dict[tuple[str, int], int] = {}
        """At the caller: every writer's part of every counter, by edge and writer."""
        self.news = threading.Event()

    def open(self, end: End) -> Any:
        """Return the live handle of an end."""
        return LocalKeep() if end.side == "keep" else self._ends[end.edge, end.side, end.reader]

    def wait(self, waitables: Sequence[Any], seconds: float | None) -> None:
        """Wait for any news."""
        self.news.wait(seconds)
        self.news.clear()

    def deliver(self, edge: str, sequence: int, frame: Buffer | None) -> None:
        """Take in a message of a stream."""
        self._ends[edge, "receiver", 0].put(sequence, frame)
        self.news.set()

    def credit(self, edge: str, taken: int) -> None:
        """Note how many messages of a stream were taken."""
        sender = self._ends[edge, "sender", 0]
        sender.taken = max(sender.taken, taken)
        self.news.set()

    def update(self, edge: str, reader: int, stamp: int, frame: Buffer) -> None:
        """Take in a new latest value."""
        self._ends[edge, "subscriber", reader].put(stamp, frame)
        self._post(self._routes.holders[edge, "publisher", 0], "confirm", edge, reader, stamp)
        self.news.set()

    def confirm(self, edge: str, reader: int, stamp: int) -> None:
        """Note that a subscriber has a value."""
        self._ends[edge, "publisher", 0].confirm(reader, stamp)

    def cells(self) -> dict[tuple[str, int], int]:
        """Return the own parts of all counters."""
        return {(edge, reader): end.own() for (edge, side, reader), end in self._ends.items() if side == "counter"}

    def gather(self, cells: dict[tuple[str, int], int]) -> dict[str, int]:
        """At the caller: note the parts of one holder; returns all totals."""
        for cell, value in [*cells.items(), *self.cells().items()]:
            self._board[cell] = max(value, self._board.get(cell, 0))  # calls may overtake each other
        totals: dict[str, int] = {}
        for (edge, _), value in self._board.items():
            totals[edge] = totals.get(edge, 0) + value
        self.learn(self.cells(), totals)
        return totals

    def learn(self, cells: dict[tuple[str, int], int], totals: dict[str, int]) -> None:
        """Note the totals that were gathered when the own parts were these."""
        for (edge, reader), value in cells.items():
            self._ends[edge, "counter", reader].others = totals[edge] - value

    def _make(self, end: End) -> Any:
        edge, post, holders = end.edge, self._post, self._routes.holders
        if end.side == "sender":
            receiver = holders[edge, "receiver", 0]
            return MailSender(end.capacity, lambda sequence, frame: post(receiver, "deliver", edge, sequence, frame))
        if end.side == "receiver":
            sender = holders[edge, "sender", 0]
            return MailReceiver(lambda taken: post(sender, "credit", edge, taken))
        if end.side == "publisher":
            readers = self._routes.subscribers(edge)
            return MailPublisher(
                list(readers), self._share, lambda reader, *value: post(readers[reader], "update", edge, reader, *value)
            )
        return MailSubscriber() if end.side == "subscriber" else MailCounter()
