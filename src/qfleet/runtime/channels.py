"""The edges between processes of one machine: what is made for them in the run's folder, and what opens their ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from qfleet.core.errors import ConfigError
from qfleet.runtime.graph import End, Graph
from qfleet.runtime.keeps import FileKeep, KeepReader, create_keep
from qfleet.runtime.latest import LatestPublisher, LatestSubscriber, create_latest
from qfleet.runtime.memory import attach, create
from qfleet.runtime.streams import Level, StreamReceiver, StreamSender, create_stream, read_level


class SharedCounter:
    """One writer's cell of a run-wide counter; nobody else writes it, so no lock is needed."""

    def __init__(self, stem: Path, writer: int) -> None:
        self._cells = attach(stem).view(np.int64)
        self._writer = writer

    def add(self, amount: int) -> None:
        """Add to this writer's cell."""
        self._cells[self._writer] += amount

    def own(self) -> int:
        """Return what this writer's cell holds."""
        return int(self._cells[self._writer])

    def total(self) -> int:
        """Return the sum over all writers."""
        return int(self._cells.sum())

    def state(self) -> int:
        """Return this writer's part."""
        return self.own()

    def load(self, state: int) -> None:
        """Continue from this writer's former part."""
        self._cells[self._writer] = state


@dataclass
class Ports:
    """What one process needs to open its ends; can be sent to a new process."""

    folder: Path
    """The run's, in the shared memory of the process's machine."""
    life: int = 0
    """How often the role of the process was begun anew."""
    gone: int = 0
    """How many of its group are not there."""
    planned: bool = False
    """Whether its former life was ended on purpose."""
    meeting: str = ""
    """Where its group meets, if that is on several nodes."""
    hold: bool = True
    """Whether received messages wait for an acknowledgement: those of a role do, but for what it can ask for again."""

    def open(self, end: End) -> Any:
        """Return the live handle of an end."""
        stem = edge_stem(self.folder, end.edge)
        if end.side == "keep":
            told = (self.life, end.setting, self.gone, self.planned, self.meeting)
            return FileKeep(keep_stem(self.folder, end.edge), *told)
        if end.side == "kept":
            return KeepReader(keep_stem(self.folder, end.edge))
        if end.side == "sender":
            return StreamSender(stem, end.setting)
        if end.side == "receiver":
            hold = self.hold and (end.views or not end.asking)
            return StreamReceiver(stem, end.views, hold)
        if end.side == "counter":
            return SharedCounter(stem, end.reader)
        return LatestPublisher(stem) if end.side == "publisher" else LatestSubscriber(stem, end.views)


def lay_out(graph: Graph, folder: Path, edges: Collection[str] | None = None) -> None:
    """Make the files of all streams and latest values, or of some, and those of all counters and keeps."""
    for edge, capacity in graph.streams.items():
        if capacity < 1:
            raise ConfigError(f"stream '{edge}': a capacity of {capacity} is less than 1")
        if edges is None or edge in edges:
            create_stream(edge_stem(folder, edge), capacity)
    for edge in graph.latest_values:
        if edges is None or edge in edges:
            create_latest(edge_stem(folder, edge))
    for edge in graph.counters:
        create(edge_stem(folder, edge), 8 * graph.counters[edge])
    for name in graph.keeps:
        create_keep(keep_stem(folder, name))


class StreamLevels:
    """Sees how all streams of a graph stand, without being an end of any."""

    def __init__(self, graph: Graph, folder: Path) -> None:
        self._cells = {edge: attach(edge_stem(folder, edge)).view(np.int64) for edge in graph.streams}

    def read(self) -> list[Level]:
        """Return how every stream stands now."""
        return [read_level(edge, cells) for edge, cells in self._cells.items()]


def edge_stem(folder: Path, edge: str) -> Path:
    """Return the path whose name all files of an edge begin with."""
    return folder / quote(edge, safe="")


def keep_stem(folder: Path, name: str) -> Path:
    """Return the same of a keep; no edge's path has a colon in it."""
    return folder / f"keep:{quote(name, safe='')}"
