"""What runs in Ray actors: a role with its worker, and the keeper of what outlives the roles of a node."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from qfleet.core import failpoints, history
from qfleet.core.protocols import Report
from qfleet.core.waiting import Waiter
from qfleet.runtime.channels import Ports, edge_stem, lay_out
from qfleet.runtime.crossings import Depot, Imports, Parcel, Question
from qfleet.runtime.graph import Graph
from qfleet.runtime.memory import RunFolder, attach
from qfleet.runtime.ray_calls import AGAIN_S, insist
from qfleet.runtime.streams import read_level
from qfleet.runtime.worker import (
    Answer,
    Command,
    Worker,
    be_nice,
    failed,
    name_process,
    note_last_words,
    set_threads,
)

PATIENCE_S = 0.5
"""How long a call stays where it was made, when there is nothing to tell."""
_STOP_S = 5.0
_TRANSFER_S, _LONGEST_TRANSFER_S = 5.0, 300.0
"""How long what another node sends may be on its way at first, and at most, before it is asked for again."""


@dataclass(frozen=True)
class RoleSetup:
    """What an actor is told when it becomes a role; the same in every life, but for its ports, and where roles share
    processes."""

    name: str
    payloads: tuple[bytes, ...]
    """The roles that it is."""
    ports: Ports
    threads: int
    background: bool
    last_words: Path
    faults: str
    history: str


@dataclass(frozen=True)
class Said:
    """What a role's actor tells its driver."""

    pid: int
    obeyed: int
    """How many commands it has passed on."""
    first: int
    """The number of the first of the answers."""
    answers: list[Answer]
    reports: list[Report]


class RoleActor:
    """A process with everything imported that becomes one role once, for one life of it."""

    def __init__(self, modules: Sequence[str], search_path: Sequence[str]) -> None:
        sys.path += [folder for folder in search_path if folder not in sys.path]
        for module in modules:
            importlib.import_module(module)
        self._said: list[Answer] = []
        self._news = threading.Condition()
        self._obeyed = self._calls = 0
        self._worker: Worker | None = None
        self._host: threading.Thread | None = None
        self._alarm, self._ring = socket.socketpair()

    def ready(self) -> None:
        """Return when everything is imported."""

    def live(self, setup: RoleSetup) -> None:
        """Become a role; its steps wait for a command. A second call, by a carrier that lost a reply, does nothing."""
        with self._news:
            if self._host is None:
                self._host = threading.Thread(target=self._run, args=(setup,), name="host", daemon=True)
                self._host.start()

    def talk(self, orders: Mapping[int, tuple[Command, str]], known: int, patience: float) -> Said:
        """Obey numbered commands, each once and in order; return what was said beyond the first `known` answers.

        Waits so many seconds for that, or until it is called again: one call at a time is enough to hear everything.
        Where there was a command, it says at once that it came.
        """
        with self._news:
            self._calls, before = self._calls + 1, self._obeyed
            call = self._calls
            self._news.notify_all()
            while self._worker is not None and self._obeyed in orders:
                self._worker.command(*orders[self._obeyed])
                self._obeyed += 1
                self._ring.send(b"!")
            if self._obeyed == before:
                self._news.wait_for(lambda: len(self._said) > known or self._calls > call, patience)
            reports = self._worker.reports() if self._worker else []
            return Said(os.getpid(), self._obeyed, known, self._said[known:], reports)

    def finish(self) -> None:
        """Wait for the role to have closed."""
        if self._host:
            self._host.join(_STOP_S)

    def _run(self, setup: RoleSetup) -> None:
        name_process(setup.name)
        set_threads(setup.threads)
        note_last_words(setup.last_words)
        if setup.background:
            be_nice()
        failpoints.arm(setup.faults, setup.name, setup.ports.life)
        history.begin(setup.history, setup.name, setup.ports.life)
        try:
            nodes = [cloudpickle.loads(payload) for payload in setup.payloads]
        except Exception as error:
            self._say(failed(error))
            return
        worker = Worker(nodes, setup.ports.open, self._waiting(), self._say)
        with self._news:
            self._worker = worker
        worker.run()

    def _waiting(self) -> Any:
        waiter, alarm = Waiter(self._alarm), self._alarm

        def wait(waitables: Sequence[Any], seconds: float | None) -> None:
            if waiter.wait(waitables, seconds):
                alarm.recv(1)

        return wait

    def _say(self, what: Answer | Report) -> None:
        with self._news:
            if isinstance(what, Answer):
                self._said.append(what)
                self._news.notify_all()


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
            with contextlib.suppress(ActorDiedError):  # a node that is lost has nothing more to tell
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
                self._ask(source, 2 * PATIENCE_S)
            except ActorDiedError:
                return
            except RayError:
                time.sleep(AGAIN_S)

    def _tell_taken(self) -> None:
        """Tell senders elsewhere at once what roles here have taken."""
        while not self._closed.is_set():
            poll, bells = select.poll(), [entry.bell for entry in list(self._depot.entries.values())]
            for bell in bells:
                poll.register(bell, select.POLLIN)
            if poll.poll(1e3 * PATIENCE_S):
                for bell in bells:
                    bell.silence()
                for source in self._sources:
                    with contextlib.suppress(RayError):
                        self._ask(source, 0.0)


def end_process(pid: int) -> None:
    """Kill a process that leads its group, and what is left of the group if it is dead."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
