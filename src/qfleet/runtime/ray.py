"""The placement for many machines: every role a Ray actor; the only file that names ray.

A role's host loop runs in a thread of its actor, so that the actor's methods, by which peers deliver messages and the
driver commands, stay responsive. Nothing is restarted by Ray: a rebuilt empty actor is worse than a failure.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError, MissingExtra
from qfleet.core.protocols import Report
from qfleet.runtime import framing
from qfleet.runtime.framing import Buffer, Frame
from qfleet.runtime.graph import End, Graph, Node
from qfleet.runtime.mail import CALLER, MailRoom, Routes, find_routes
from qfleet.runtime.supervisor import Member, SupervisedPlacement, starting
from qfleet.runtime.worker import Answer, Command, OpenEnds, Worker, failed, set_threads

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError
except ImportError as error:
    raise MissingExtra("ray", "ray", "the placement 'ray'") from error

_POLL_S = 0.05
"""How often the driver asks each actor, and each actor the counters' totals."""
_STOP_S = 5.0
_MOST_UNSETTLED = 64


class Postman:
    """Calls methods of other actors without waiting, and can wait for all of it to have arrived."""

    def __init__(self) -> None:
        self.actors: Mapping[str, Any] = {}
        self._unsettled: list[Any] = []
        self._lock = threading.Lock()

    def post(self, holder: str, method: str, *arguments: Any) -> None:
        """Call a mail room's method; what becomes of a dead peer is the driver's to say."""
        call = self.actors[holder].mail.remote(method, *arguments)
        with self._lock:
            self._unsettled.append(call)
            if len(self._unsettled) > _MOST_UNSETTLED:
                _, self._unsettled = ray.wait(self._unsettled, num_returns=len(self._unsettled), timeout=0)

    def settle(self) -> None:
        """Wait until everything posted so far has arrived, or its addressee is dead."""
        with self._lock:
            calls, self._unsettled = self._unsettled, []
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=_STOP_S)


class RoleActor:
    """What lives in one Ray actor: a mail room, and the worker of a role (none for the caller's ends)."""

    def __init__(self, holder: str, routes: Routes, threads: int) -> None:
        set_threads(threads)
        self._postman = Postman()
        self._room = MailRoom(holder, routes, self._postman.post, ray.put)
        self._early: list[tuple[str, tuple[Any, ...]]] = []
        """Calls of peers that came before it was known who they are, and so could not be answered."""
        self._said: list[Answer] = []
        self._ends = OpenEnds(self._room.open)
        self._worker: Worker | None = None
        self._host: threading.Thread | None = None

    def start(self, actors: Mapping[str, Any], search_path: list[str], payload: bytes) -> None:
        """Learn who the others are, then build the role, if there is one; its steps wait for a command."""
        self._postman.actors = actors
        for method, arguments in self._early:
            self.mail(method, *arguments)
        self._early.clear()
        sys.path += [folder for folder in search_path if folder not in sys.path]
        try:
            node = cloudpickle.loads(payload)
        except Exception as error:
            self._say(failed(error))
            return
        if node is not None:
            self._worker = Worker(node, self._room.open, self._room.wait, self._say)
            self._host = threading.Thread(target=self._worker.run, name="host", daemon=True)
            self._host.start()
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()

    def mail(self, method: str, *arguments: Any) -> None:
        """Pass a peer's call on to the mail room."""
        if self._postman.actors:
            getattr(self._room, method)(*arguments)
        else:
            self._early.append((method, arguments))

    def gather(self, cells: dict[tuple[str, int], int]) -> dict[str, int]:
        """At the caller: exchange one holder's counters for the totals."""
        return self._room.gather(cells)

    def hear(self, known: int) -> tuple[list[Answer], Report | None]:
        """Return what the worker said beyond the first `known` answers, and its newest report."""
        return self._said[known:], self._worker.report() if self._worker else None

    def command(self, name: Command, argument: str) -> None:
        """Pass a command on to the worker."""
        if self._worker:
            self._worker.command(name, argument)
            self._room.news.set()

    def use(self, end: End, method: str, *arguments: Buffer) -> Buffer:
        """Call a method of an end that the driver holds; all values travel as frames."""
        values = [framing.read(framing.copy(argument)) for argument in arguments]
        return Frame(getattr(self._ends.open(end), method)(*values)).to_buffer()

    def own_ends(self, method: str, directory: str) -> None:
        """Save or restore the ends that the driver holds."""
        getattr(self._ends, method)(Path(directory), CALLER)
        self._postman.settle()

    def finish(self) -> None:
        """Wait for the role to have closed."""
        if self._host:
            self._host.join(_STOP_S)

    def _say(self, what: Answer | Report) -> None:
        """Keep an answer; first let what the role sent, counted and took arrive, so that a cut is one everywhere."""
        if isinstance(what, Answer):
            self._postman.settle()
            self._exchange()
            self._said.append(what)

    def _pulse(self) -> None:
        while self._room.cells():
            time.sleep(_POLL_S)
            self._exchange()

    def _exchange(self) -> None:
        cells = self._room.cells()
        if cells and CALLER in self._postman.actors:
            with contextlib.suppress(RayError):  # a dead actor is named by the driver
                self._room.learn(cells, ray.get(self._postman.actors[CALLER].gather.remote(cells)))


class CallerEnd:
    """An end that the driver holds: it lives in an actor of its own, because a driver cannot be called."""

    def __init__(self, actor: Any, end: End) -> None:
        self._actor, self._end = actor, end

    def waitable(self) -> None:
        """Nothing to wait on: a driver polls."""

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            frames = [Frame(argument).to_buffer() for argument in arguments]
            return framing.read(framing.copy(ray.get(self._actor.use.remote(self._end, method, *frames))))

        return call


class RayPlacement(SupervisedPlacement):
    """Runs each node of a graph as a Ray actor, on the cluster at `address`, or on this machine if None."""

    name = "ray"

    def __init__(self, graph: Graph, address: str | None = None, threads: Mapping[str, int] | None = None) -> None:
        super().__init__(graph)
        self._owns_ray = _connect(address)
        self._actors: dict[str, Any] = {}
        self._watched = list(self.crew)
        self._known: dict[str, int] = {}
        self._dead: set[str] = set()
        try:
            routes = find_routes(graph)
            nodes: dict[str, Node | None] = {node.name: node for node in graph.nodes}
            if routes.ends[CALLER] or graph.counters:
                nodes[CALLER] = None
                self._watched.append(starting(CALLER, CALLER, 0))
            share, namespace = _cpu_share(len(nodes)), f"qfleet-{secrets.token_hex(4)}"
            for name, node in nodes.items():
                options = {"name": name, "namespace": namespace, "num_cpus": share, "max_restarts": 0}
                count = (threads or {}).get(node.kind, 1) if node else 1
                self._actors[name] = ray.remote(RoleActor).options(**options).remote(name, routes, count)
            for name, node in nodes.items():
                self._actors[name].start.remote(self._actors, sys.path, _payload(node))
            self._await("built")
        except BaseException:
            self.close()
            raise

    def open(self, end: Any) -> Any:
        """Return the live handle of an end that the caller holds."""
        return CallerEnd(self._actors[CALLER], end)

    def _tell(self, member: Member, command: Command, argument: str) -> None:
        self._actors[member.name].command.remote(command, argument)

    def _listen(self, seconds: float) -> list[tuple[Member, Answer | Report]]:
        time.sleep(min(seconds, _POLL_S))
        living = [member for member in self._watched if member.name not in self._dead]
        calls = [self._actors[m.name].hear.remote(self._known.get(m.name, 0)) for m in living]
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=max(seconds, _POLL_S)) if calls else ([], [])
        heard: list[tuple[Member, Answer | Report]] = []
        for member, call in zip(living, calls, strict=True):
            if call in ready:
                heard += [(member, item) for item in self._hear_one(member.name, call)]
        return heard

    def _hear_one(self, name: str, call: Any) -> list[Answer | Report]:
        try:
            answers, report = ray.get(call)
        except RayError as error:
            self._dead.add(name)
            return [Answer("died", f"its Ray actor died: {_brief(error)}")]
        self._known[name] = self._known.get(name, 0) + len(answers)
        return [*([report] if report else []), *answers]

    def _save_own_ends(self, directory: Path) -> None:
        self._own_ends("save", directory)

    def _restore_own_ends(self, directory: Path) -> None:
        self._own_ends("restore", directory)

    def _own_ends(self, method: str, directory: Path) -> None:
        if CALLER in self._actors:
            ray.get(self._actors[CALLER].own_ends.remote(method, str(directory.resolve())))

    def _end(self) -> None:
        for actor in self._actors.values():
            actor.command.remote("stop", "")
        finishing = [actor.finish.remote() for actor in self._actors.values()]
        if finishing:
            ray.wait(finishing, num_returns=len(finishing), timeout=_STOP_S)
        for actor in self._actors.values():
            ray.kill(actor)
        gone = [actor.finish.remote() for actor in self._actors.values()]  # a call to a dead actor fails at once
        if gone:
            ray.wait(gone, num_returns=len(gone), timeout=_STOP_S)
        if self._owns_ray:
            stop_local()


def start_local() -> None:
    """Start a Ray of this machine alone: quiet, on loopback, with a token, because Ray listens on all addresses."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one into the home folder
    ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", **_QUIET)


def stop_local() -> None:
    """Leave Ray, and end it if it was started here."""
    ray.shutdown()


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def _connect(address: str | None) -> bool:
    """Make sure that there is a Ray to use; returns whether it is this placement's to leave."""
    if ray.is_initialized():
        return False
    if address is None:
        start_local()
        return True
    try:
        ray.init(address=address, **_QUIET)
    except (ConnectionError, RayError) as error:
        raise ConfigError(f"no Ray cluster answers at {address} ({error}): start one or leave --address out") from error
    return True


def _cpu_share(actors: int) -> float:
    """Return the CPUs that each actor asks for: one, or so little that two runs fit the cluster."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return min(1.0, math.floor(100 * resources.get("CPU", 0.0) / (2 * actors)) / 100)


def _payload(node: Node | None) -> bytes:
    packed: bytes = cloudpickle.dumps(node)  # type: ignore[no-untyped-call]
    return packed


def _brief(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:400]
