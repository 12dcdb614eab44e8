"""The placement for a laptop, a debugger and bit-exact runs: every role in this process, stepped in a fixed order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from qfleet.core import codec, failpoints
from qfleet.core.errors import CheckpointError
from qfleet.core.protocols import Incident, Report
from qfleet.core.role import State
from qfleet.core.types import Notice
from qfleet.runtime import checkpoint, edgestates
from qfleet.runtime.captured import Captured
from qfleet.runtime.graph import End, Graph, received_streams
from qfleet.runtime.host import Host, build
from qfleet.runtime.keeps import LocalKeep
from qfleet.runtime.writing import OwnWriting

Copy = Callable[[Any], Any]


class LocalStream:
    """A bounded queue within one process; both ends at once."""

    def __init__(self, capacity: int, copy: Copy) -> None:
        self.capacity = capacity
        self.queue: deque[Any] = deque()
        self.closed = False
        self._copy, self._sent = copy, 0

    def waitable(self) -> None:
        """Nothing to wait on: the other end is stepped by the same host."""

    def ready(self) -> bool:
        """Return whether one more message fits."""
        return len(self.queue) < self.capacity

    def send(self, message: Any) -> None:
        """Append one message."""
        if not self.ready():
            raise RuntimeError("sent into a full stream: ask ready() first")
        self.queue.append(self._copy(message))
        self._sent += 1

    def sent(self) -> int:
        """Return how many messages were sent here."""
        return self._sent

    def deserted(self) -> bool:
        """Return False: roles of one process stay or end together."""
        return False

    def receive(self) -> Any | None:
        """Return the next message, or None."""
        return self.queue.popleft() if self.queue else None

    def close(self) -> None:
        """Say that no further message will come."""
        self.closed = True

    def exhausted(self) -> bool:
        """Return whether the stream is closed and empty."""
        return self.closed and not self.queue


class LocalLatest:
    """A latest value within one process: the writing end."""

    def __init__(self, copy: Copy) -> None:
        self.value: Any = None
        self.stamp = 0
        self._copy = copy

    def publish(self, message: Any) -> None:
        """Replace the value."""
        self.value = self._copy(message)
        self.stamp += 1


class LocalSubscriber:
    """A latest value within one process: a reading end."""

    def __init__(self, source: LocalLatest) -> None:
        self._source = source
        self.seen = 0

    def waitable(self) -> None:
        """Nothing to wait on: the other end is stepped by the same host."""

    def latest(self) -> Any | None:
        """Return the newest value if it was not returned before."""
        if self.seen == self._source.stamp:
            return None
        self.seen = self._source.stamp
        return self._source.value


class LocalCells:
    """All cells of a run-wide counter within one process."""

    def __init__(self) -> None:
        self.cells: list[int] = []
        self.total = 0

    def load(self, state: list[int] | int) -> None:
        """Continue from former cells; older checkpoints have their sum alone, which the first writer then has."""
        cells = [state] if isinstance(state, int) else state
        self.cells = [*cells, *self.cells[len(cells) :]]
        self.total = sum(self.cells)


class LocalCounter:
    """One writer's cell of a run-wide counter within one process."""

    def __init__(self, counter: LocalCells, writer: int) -> None:
        self._counter, self._writer = counter, writer
        counter.cells += [0] * (writer + 1 - len(counter.cells))

    def add(self, amount: int) -> None:
        """Add to this writer's cell."""
        self._counter.cells[self._writer] += amount
        self._counter.total += amount

    def own(self) -> int:
        """Return what this writer's cell holds."""
        return self._counter.cells[self._writer]

    def total(self) -> int:
        """Return the sum over all writers."""
        return self._counter.total


class InlinePlacement:
    """Runs a graph in this process. `strict` sends every message through the serialiser, as other placements must."""

    name = "inline"

    def __init__(self, graph: Graph, strict: bool = False) -> None:
        failpoints.arm(failpoints.wanted(), self.name)
        self._copy: Copy = codec.roundtrip if strict else _same
        self._edges: dict[str, Any] = {}
        self._optional: set[str] = set()
        self._subscribers: dict[str, LocalSubscriber] = {}
        self._received = received_streams(graph)
        self._host = Host([build(node, self.open) for node in graph.nodes])

    def open(self, end: Any) -> Any:
        """Return the live handle for an end; the run's monitor opens its own ends here too."""
        assert isinstance(end, End)
        if end.side == "keep":
            return LocalKeep()
        if end.optional:
            self._optional.add(end.edge)
        if end.side in ("sender", "receiver"):
            return self._edges.setdefault(end.edge, LocalStream(end.capacity, self._copy))
        if end.side == "counter":
            return LocalCounter(self._edges.setdefault(end.edge, LocalCells()), end.reader)
        source = self._edges.setdefault(end.edge, LocalLatest(self._copy))
        if end.side == "publisher":
            return source
        return self._subscribers.setdefault(f"{end.edge}/{end.reader}", LocalSubscriber(source))

    @property
    def done(self) -> bool:
        """Whether every role has finished."""
        return self._host.done

    def advance(self) -> None:
        """Let every role do one unit of work."""
        self._host.round()

    def reports(self) -> list[Report]:
        """Return what is known of every role now, with how many messages wait for it."""
        return [replace(hosted.report(), queue=self._queue(hosted.node.name)) for hosted in self._host.hosted]

    def _queue(self, name: str) -> int | None:
        edges = self._received.get(name)
        return sum(len(self._edges[edge].queue) for edge in edges) if edges else None

    def incidents(self) -> list[Incident | Notice]:
        """Return nothing: one process lives or dies as a whole."""
        return []

    def pause(self) -> None:
        """Do nothing: between two calls of `advance` nothing moves."""

    def attend(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def save(self, directory: Path) -> OwnWriting:
        """Take the state of every role, and of the edges between them, for a directory."""
        hosted_all = self._host.hosted
        states = [Captured(directory, hosted.node.name, hosted.role.state_dict()) for hosted in hosted_all]
        return OwnWriting([*states, Captured(directory, edgestates.WHOLE, self._edge_states())])

    def _edge_states(self) -> State:
        edges: State = {}
        for name, edge in self._edges.items():
            if isinstance(edge, LocalStream):
                edges[name] = list(edge.queue)
            elif isinstance(edge, LocalLatest):
                edges[name] = {"value": edge.value, "stamp": edge.stamp}
            else:
                edges[name] = edge.cells
        seen = {name: subscriber.seen for name, subscriber in self._subscribers.items()}
        return {"edges": edges, "seen": seen}

    def restore(self, directory: Path) -> None:
        """Continue from what any placement wrote for the same graph; roles close their streams anew."""
        saved = edgestates.of_all(directory)
        for name, edge in self._edges.items():
            if name not in saved["edges"]:
                if name in self._optional:
                    continue
                raise CheckpointError(f"{directory} has no edge '{name}': it was made by a differently arranged run")
            content = saved["edges"][name]
            if isinstance(edge, LocalStream):
                edge.queue = deque(content)
            elif isinstance(edge, LocalLatest):
                edge.value, edge.stamp = content["value"], content["stamp"]
            else:
                edge.load(content)
        for name, subscriber in self._subscribers.items():
            subscriber.seen = saved["seen"].get(name, 0)
        for hosted in self._host.hosted:
            hosted.role.load_state_dict(checkpoint.read_state(directory, hosted.node.name))

    def close(self) -> None:
        """Close every role."""
        for hosted in self._host.hosted:
            hosted.role.close()


def _same(message: Any) -> Any:
    return message
