"""What runs in a Ray actor on every node, where there are several: the keeper of what outlives the roles there."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from qfleet.runtime.channels import edge_stem, lay_out
from qfleet.runtime.children import end_process
from qfleet.runtime.crossings import Depot, Imports, Parcel, Question
from qfleet.runtime.graph import Graph
from qfleet.runtime.memory import RunFolder, attach
from qfleet.runtime.ray_calls import AGAIN_S, DEAD, insist
from qfleet.runtime.streams import read_level

_PATIENCE_S = 1.0
"""How long a question stays where it was asked, when there is nothing to tell."""
_LOOK_S = 0.5
"""How often a thread looks whether the run is over."""
_TRANSFER_S, _LONGEST_TRANSFER_S = 5.0, 300.0
"""How long what another node sends may be on its way at first, and at most, before it is asked for again."""


class Keeper:
    """Owns one node's part of the run's edges, and what its roles keep; has what is new on other nodes come here.

    On the driver's node the folder is the driver's. Each method bears to be called again by who lost its answer.
    """

    def __init__(self, folder: Path | None) -> None:
        self._own = RunFolder() if folder is None else None
        self._folder = folder or self._own.path  # type: ignore[union-attr]
        self._closed = threading.Event()
        self._beginning = threading.Lock()
        self._begun: set[str] = set()
        """What is done once, and was."""
        self._put: dict[str, tuple[int, Any]] = {}
        """The newest values that were asked for, as Ray objects: each is put once, for all nodes."""
        self._transfer_s, self._getting = _TRANSFER_S, threading.Lock()
        """How long an answer may take, and who waits for a value: one thread at a time, since Ray has had defects where
        several of a process wait for objects of other nodes."""
        self._depot: Depot
        self._keepers: Mapping[str, Any] = {}

    def folder(self) -> Path:
        """Return where the edges of this node are."""
        return self._folder

    def lay_out(self, edges: Graph, here: set[str]) -> None:
        """Make the files of a graph's edges that are used here."""
        with self._once("lay_out") as first:
            if first:
                lay_out(edges, self._folder, here)

    def begin(
        self,
        name: str,
        keepers: Mapping[str, Any],
        imports: Mapping[str, Imports],
        exports: Mapping[str, Imports],
        begun: Mapping[str, int],
    ) -> None:
        """Learn who the others are and what is exchanged with them, and with which messages streams begin."""
        with self._once("begin") as first:
            if first:
                self._name, self._keepers, self._sources = name, keepers, list(imports)
                self._depot = Depot(self._folder, imports, exports, begun)

    def carry(self) -> None:
        """Let what is new on other nodes come here from now on."""
        with self._once("carry") as first:
            if not first:
                return
            for source in self._sources:
                threading.Thread(target=self._follow, args=(source,), name=f"from {source}", daemon=True).start()
            if self._depot.entries:
                threading.Thread(target=self._tell_taken, name="taken", daemon=True).start()

    def fetch(self, asker: str, question: Question, patience: float) -> Parcel:
        """Answer another node's question, when there is something new or so many seconds have passed."""
        self._depot.wait(asker, question, patience)
        parcel = self._depot.answer(asker, question)
        return replace(parcel, values={edge: self._object(edge, *value) for edge, value in parcel.values.items()})

    def settle(self) -> None:
        """Have everything come here that is new elsewhere; all roles are paused."""
        for source in self._sources:
            with contextlib.suppress(*DEAD):  # a node that is lost has nothing more to tell
                while not self._ask(source, 0.0):
                    pass  # another question overtook this one, and its answer may still be on its way

    def seed(self, counters: Mapping[str, Sequence[int]]) -> None:
        """Let counters begin with these cells: roles that were elsewhere before go on counting here."""
        for edge, cells in counters.items():
            attach(edge_stem(self._folder, edge)).view(np.int64)[:] = cells

    def let_go(self, edges: Sequence[str]) -> None:
        """Exchange nothing more of some streams."""
        self._depot.let_go(edges)

    def unfetched(self, edges: Sequence[str]) -> int:
        """Return how many messages of some streams have not been used up where they go to."""
        levels = (read_level(edge, attach(edge_stem(self._folder, edge)).view(np.int64)) for edge in edges)
        return sum(level.sent - level.taken for level in levels)

    def attend(self) -> None:
        """Return when the run is over: whoever waits for it hears at once when this node is lost."""
        self._closed.wait()

    def kill(self, pid: int) -> None:
        """End a process of this node, and what it has started."""
        end_process(pid)

    def close(self) -> None:
        """Give the folder back."""
        self._closed.set()
        if self._own is not None:
            self._own.remove()

    @contextlib.contextmanager
    def _once(self, what: str) -> Iterator[bool]:
        """Say whether something is to be done now; who comes second waits until the first has done it."""
        with self._beginning:
            yield what not in self._begun
            self._begun.add(what)

    def _object(self, edge: str, stamp: int, frame: Any) -> tuple[int, Any]:
        known = self._put.get(edge, (0, None))
        if known[0] < stamp:
            known = self._put[edge] = (stamp, ray.put(frame))
        return known

    def _ask(self, source: str, patience: float) -> bool:
        """Take in what another node has for this one; returns whether that was everything.

        Messages wait for no values. What does not come in time is asked for again, with more patience.
        """
        question, limit = self._depot.question(source), self._transfer_s
        try:
            parcel: Parcel = insist(self._keepers[source].fetch, self._name, question, patience, patience_s=limit)
            self._depot.take_in(source, replace(parcel, values={}))
            with self._getting:
                values = {
                    edge: (stamp, ray.get(frame, timeout=limit)) for edge, (stamp, frame) in parcel.values.items()
                }
        except GetTimeoutError:
            self._transfer_s = min(2 * limit, _LONGEST_TRANSFER_S)
            return False
        if values:
            self._depot.take_in(source, Parcel(parcel.heeded, {}, values, {}))
            self._transfer_s = max(limit / 2, _TRANSFER_S)
        return parcel.heeded

    def _follow(self, source: str) -> None:
        """Ask one node again and again; a call that is lost is made anew, a dead node is named by the driver."""
        while not self._closed.is_set():
            try:
                self._ask(source, _PATIENCE_S)
            except DEAD:
                return
            except RayError:
                time.sleep(AGAIN_S)

    def _tell_taken(self) -> None:
        """Tell senders elsewhere at once what roles here have taken."""
        while not self._closed.is_set():
            poll, bells = select.poll(), [entry.bell for entry in list(self._depot.entries.values())]
            for bell in bells:
                poll.register(bell, select.POLLIN)
            if poll.poll(1e3 * _LOOK_S):
                for bell in bells:
                    bell.silence()
                for source in self._sources:
                    with contextlib.suppress(RayError):
                        self._ask(source, 0.0)
