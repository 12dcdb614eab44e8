"""The drawing of a run: which roles there are and which edges join them, before anything is started.

An edge is named once and has ends; an end is given to a role as a handle. A placement opens ends as the real thing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from qfleet.core.protocols import Counter, Keep, KeptRows, Publisher, Receiver, Sender, Subscriber
from qfleet.core.role import Role


@dataclass(frozen=True)
class End:
    """One end of an edge, or a keep, to be opened by a placement for the role that holds it."""

    edge: str
    side: Literal["sender", "receiver", "publisher", "subscriber", "counter", "keep", "kept"]
    capacity: int = 0
    """How many messages a stream holds at most."""
    reader: int = 0
    """Which of a latest-value edge's subscribers, or of a counter's writers, this is."""
    views: bool = False
    """Whether what is received may lie in memory that is used again: arrays of a stream's message after the step that
    received it, those of a latest value after the next one."""
    asking: bool = False
    """Whether a stream carries only what a source needs to go on: requests and their replies."""
    optional: bool = False
    """Whether a checkpoint may lack it, as those of older versions do: it then begins empty."""
    setting: str = ""
    """Of a keep or a sender: the setting that its size follows from, for the message when there is no room."""


@dataclass(frozen=True)
class Node:
    """One role of the run: what is needed to build it anywhere, never an instance."""

    kind: str
    index: int
    build: Callable[[Any, Any], Role]
    config: Any
    handles: Any
    """A dataclass whose fields are ends, other such dataclasses, tuples of these, or None."""

    @property
    def name(self) -> str:
        """The unique name of the node, such as "actor-0"."""
        return f"{self.kind}-{self.index}"


@dataclass
class Graph:
    """The nodes in the order in which one process steps them, and their edges."""

    nodes: list[Node] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=dict)
    """Capacity of each stream by name."""
    latest_values: dict[str, int] = field(default_factory=dict)
    """Number of subscribers of each latest-value edge by name."""
    counters: dict[str, int] = field(default_factory=dict)
    """Number of writers of each counter by name."""
    keeps: set[str] = field(default_factory=set)
    """Names of the keeps."""
    asides: set[str] = field(default_factory=set)
    """Names of the streams that carry what a person should know, which is nobody's work."""

    def add(self, role: type[Role], config: Any, handles: Any) -> None:
        """Add a role; its index counts the roles of its kind."""
        index = sum(node.kind == role.kind for node in self.nodes)
        build = cast("Callable[[Any, Any], Role]", role)
        self.nodes.append(Node(role.kind, index, build, config, handles))

    def stream(
        self,
        name: str,
        capacity: int,
        views: bool = False,
        setting: str = "",
        asking: bool = False,
        optional: bool = False,
        aside: bool = False,
    ) -> tuple[Sender[Any], Receiver[Any]]:
        """Draw a bounded stream from one role to another; returns its two ends.

        With `views` a message's arrays may be gone after the step that received it: for roles that use them up.
        `setting` is what the size of its messages follows from. With `asking` a role that receives nothing else is a
        source all the same: it only asks for what it needs to go on. An `optional` one begins empty where a checkpoint
        does not know it. An `aside` is only for a person to read.
        """
        if name in self.streams:
            raise ValueError(f"the stream '{name}' is drawn twice")
        self.streams[name] = capacity
        if aside:
            self.asides.add(name)
        receiver = End(name, "receiver", capacity, views=views, asking=asking, optional=optional)
        sender = End(name, "sender", capacity, setting=setting, optional=optional)
        return cast("Sender[Any]", sender), cast("Receiver[Any]", receiver)

    def publisher(self, name: str, optional: bool = False) -> Publisher[Any]:
        """Return the writing end of a latest-value edge; an `optional` one may be new to a checkpoint."""
        self.latest_values.setdefault(name, 0)
        return cast("Publisher[Any]", End(name, "publisher", optional=optional))

    def subscriber(self, name: str, views: bool = False, optional: bool = False) -> Subscriber[Any]:
        """Return one more reading end of a latest-value edge; an `optional` one may be new to a checkpoint.

        With `views` a value's arrays may be gone when the next one is read: for roles that copy them at once.
        """
        reader = _next(self.latest_values, name)
        return cast("Subscriber[Any]", End(name, "subscriber", reader=reader, views=views, optional=optional))

    def counter(self, name: str) -> Counter:
        """Return one more writer's end of a run-wide counter."""
        return cast("Counter", End(name, "counter", reader=_next(self.counters, name)))

    def keep(self, name: str, setting: str = "") -> Keep:
        """Return the memory of one role that outlives its process; `setting` is what its size follows from."""
        if name in self.keeps:
            raise ValueError(f"the keep '{name}' is drawn twice")
        self.keeps.add(name)
        return cast("Keep", End(name, "keep", setting=setting))

    def kept(self, name: str) -> KeptRows:
        """Return a sight of the arrays in another role's keep; only for placements on one machine."""
        return cast("KeptRows", End(name, "kept"))


def _next(counts: dict[str, int], name: str) -> int:
    counts[name] = counts.get(name, 0) + 1
    return counts[name] - 1


def open_handles(handles: Any, open_end: Callable[[End], Any]) -> Any:
    """Return a copy of a handles dataclass with every end opened."""

    def opened(value: Any) -> Any:
        if isinstance(value, End):
            return open_end(value)
        if isinstance(value, tuple):
            return tuple(opened(item) for item in value)
        return open_handles(value, open_end) if dataclasses.is_dataclass(value) else value

    return dataclasses.replace(
        handles, **{f.name: opened(getattr(handles, f.name)) for f in dataclasses.fields(handles)}
    )


def ends(handles: Any) -> list[End]:
    """Return every end that a handles dataclass holds."""
    found: list[End] = []

    def collect(end: End) -> End:
        found.append(end)
        return end

    open_handles(handles, collect)
    return found


def received_streams(graph: Graph) -> dict[str, list[str]]:
    """Return the streams that each role receives from, by its name; who receives from none is left out."""
    found = {node.name: [end.edge for end in ends(node.handles) if end.side == "receiver"] for node in graph.nodes}
    return {name: edges for name, edges in found.items() if edges}


def facing(graph: Graph) -> dict[str, dict[str, list[str]]]:
    """Return who is at the other end of each stream and latest value that a role holds an end of: by its name, then by
    the edge's. Nobody is where the caller holds that end."""
    sides = {"sender": "receiver", "receiver": "sender", "publisher": "subscriber", "subscriber": "publisher"}
    held = [(node.name, end) for node in graph.nodes for end in ends(node.handles) if end.side in sides]
    holders: dict[tuple[str, str], list[str]] = {}
    for name, end in held:
        holders.setdefault((end.edge, end.side), []).append(name)
    found: dict[str, dict[str, list[str]]] = {}
    for name, end in held:
        found.setdefault(name, {})[end.edge] = holders.get((end.edge, sides[end.side]), [])
    return found


def work_ends(graph: Graph) -> dict[str, list[End]]:
    """Return the ends of streams by which it can be told that a role works, by its name.

    Those are all but asides, and but requests and replies for whom these only lead to work.
    """
    asking = {end.edge for node in graph.nodes for end in ends(node.handles) if end.asking}
    found = {}
    for node in graph.nodes:
        own = [end for end in ends(node.handles) if end.side in ("sender", "receiver")]
        own = [end for end in own if end.edge not in graph.asides]
        found[node.name] = [end for end in own if end.edge not in asking] or own
    return found
