"""The placement for one machine: every role in a process of its own, edges in shared memory, this process supervising.

Children come from a forkserver that has preloaded torch and qfleet (0.01 s each instead of 4 s), or are spawned where a
role asks for a process that never forked (CUDA). They never run the user's main module: a script needs no guard.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Unpack

from qfleet.core import failpoints, history
from qfleet.core.errors import ConfigError
from qfleet.core.protocols import Machine, Report
from qfleet.core.waiting import Waiter
from qfleet.runtime.channels import Ports, StreamLevels, lay_out
from qfleet.runtime.comings import ComingsPlacement
from qfleet.runtime.graph import Graph, Node
from qfleet.runtime.memory import RunFolder
from qfleet.runtime.reviving import Revival
from qfleet.runtime.worker import (
    Answer,
    Command,
    OpenEnds,
    Worker,
    be_nice,
    failed,
    last_words,
    name_process,
    note_last_words,
    set_threads,
)

_HEARTBEAT_S = 0.5
_HERE = "here"
"""The id of the only machine."""
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to end."""


class ProcessPlacement(ComingsPlacement):
    """Runs each node of a graph in its own process.

    `spawn` names the kinds of roles that must not be forked; `threads` gives the threads of torch and OpenMP by kind,
    one where not given. Kinds in `background` leave a core to any other that wants it. Roles in `away` are not begun
    yet; those of kinds in `shared` are in so many processes.
    """

    name = "processes"

    def __init__(
        self,
        graph: Graph,
        spawn: Collection[str] = (),
        threads: Mapping[str, int] | None = None,
        background: Collection[str] = (),
        away: Collection[str] = (),
        shared: Mapping[str, int] | None = None,
        **revival: Unpack[Revival],
    ) -> None:
        super().__init__(graph, away, shared, **revival)
        self._payloads = {node.name: _payload(node) for node in graph.nodes}
        self._folder = RunFolder()
        self._setups: dict[str, _Setup] = {}
        self._warn_of_crowd(len(os.sched_getaffinity(0)))
        atexit.register(self.close)  # before multiprocessing's own handler, which would wait for the children
        try:
            lay_out(graph, self._folder.path)
            self._levels = StreamLevels(graph, self._folder.path)
            self._ends = OpenEnds(Ports(self._folder.path, hold=False).open)
            _preload(graph)
            for node in graph.nodes:
                method = "spawn" if node.kind in spawn else "forkserver"
                count = (threads or {}).get(node.kind, 1)
                behind = node.kind in background
                last_words = self._folder.path / f"{node.name}.last_words"
                ports = self._ports[node.name] = Ports(self._folder.path)
                self._setups[node.name] = _Setup(node.name, (), ports, method, count, behind, last_words)
            self._mark_away()
            for member in self.crew:
                self._lives[member.name] = self._begin(member.name)
            self._await("built")
        except BaseException:
            self.close()
            raise

    def _begin(self, name: str) -> _Child:
        payloads = tuple(self._payloads[node.name] for node in self._housed(name))
        return _Child(dataclasses.replace(self._setups[name], payloads=payloads))

    def machines(self) -> list[Machine]:
        """Return this machine."""
        return [Machine(_HERE, socket.gethostname(), float(len(os.sched_getaffinity(0))))]

    def home(self, name: str) -> str:
        """Return this machine's id."""
        return _HERE

    def _settle(self, name: str, machine: str) -> None:
        """Do nothing: all edges are here."""

    def _lodge(self, names: Sequence[str]) -> None:
        """Do nothing: there is one place."""

    def _wait_for_news(self, seconds: float) -> None:
        connection.wait([item for child in self._lives.values() for item in child.waitables()], seconds)

    def _end(self) -> None:
        atexit.unregister(self.close)
        self._end_lives()
        self._folder.remove()


@dataclass(frozen=True)
class _Setup:
    """What a child is told at its birth; the same in every life, but for its ports, and where roles share processes."""

    name: str
    payloads: tuple[bytes, ...]
    """The roles that it is."""
    ports: Ports
    method: str
    threads: int
    background: bool
    last_words: Path
    """Where a crash writes what the process was doing."""
    faults: str = field(default_factory=failpoints.wanted)
    """Which failpoints are armed; a forkserver's environment is older."""
    history: str = field(default_factory=history.wanted)
    """Where it notes what it does."""


class _Child:
    """One life of a role's process, as the supervisor holds it."""

    def __init__(self, setup: _Setup) -> None:
        context: Any = multiprocessing.get_context(setup.method)
        self._control, theirs = context.Pipe()
        self._process = context.Process(target=_child_main, name=setup.name, args=(setup, theirs, os.getpid()))
        with _main_module_hidden():
            self._process.start()
        theirs.close()
        self.pid: int = self._process.pid
        self._last_words = setup.last_words
        self._built = False
        self._deaf = False
        self._ended = False
        self._verdict = ""

    def tell(self, command: Command, argument: str) -> None:
        """Send a command; a dead child is noticed by `hear`."""
        with contextlib.suppress(OSError):
            self._control.send((command, argument))

    def waitables(self) -> list[Any]:
        """Return what becomes readable when the child speaks or dies."""
        return ([] if self._deaf else [self._control]) + ([] if self._ended else [self._process.sentinel])

    def hear(self) -> list[Answer | Report]:
        """Return what the child said, and that it died if it did without saying why."""
        ended = not self._ended and not self._process.is_alive()  # asked first: what it said before is then all there
        heard: list[Answer | Report] = []
        try:
            while not self._deaf and self._control.poll():
                heard.append(self._control.recv())
        except (EOFError, OSError):
            self._deaf = True
        answers = {item.what for item in heard if isinstance(item, Answer)}
        told = "failed" in answers
        self._built = self._built or "built" in answers
        self._ended = self._ended or told
        if ended and not told:
            self._ended = True
            heard.append(Answer("died", self._verdict or self._cause_of_death()))
        return heard

    def _cause_of_death(self) -> str:
        code: int | None = self._process.exitcode
        when = "" if self._built else " while it was being built"
        if code is None or code >= 0:
            return f"its process exited with code {code}{when}"
        return f"its process was killed by {signal.Signals(-code).name}{when}{last_words(self._last_words)}"

    def condemn(self, verdict: str) -> None:
        """Kill the process, which will be said to have died of this, unless it is dead already."""
        if not self._ended and self._process.is_alive():
            self._verdict = verdict
            self.kill()

    def join(self, until: float) -> None:
        """Wait for the process to end, at most until then."""
        self._process.join(max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        """Ask the role to close."""
        self.tell("stop", "")

    def kill(self) -> None:
        """End the process, and what it may have started."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Give back what belongs to the dead process."""
        with contextlib.suppress(ValueError):  # the forkserver hangs, so that nobody knows whether it is dead
            self._process.close()
        self._control.close()


def _preload(graph: Graph) -> None:
    """Start the forkserver with what its children need; has no effect once it runs.

    Signals that end a run are for the supervisor: the forkserver would show where it was in its imports, and could
    not begin roles anew that die meanwhile.
    """
    modules = {node.build.__module__ for node in graph.nodes}
    own = sorted(module for module in modules if module.startswith("qfleet."))
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", __name__, *own])
    resource_tracker.ensure_running()  # beforehand, since it unblocks the signals
    heeded = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)  # a new process begins with what is blocked here
    try:
        with _main_module_hidden():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heeded)


def _payload(node: Node) -> bytes:
    """Return a node as bytes; refuses what a child could not import."""
    with _main_module_hidden():
        try:
            return pickle.dumps(node)
        except Exception as error:
            raise ConfigError(
                f"{node.name} cannot be sent to another process ({error}): "
                "run with --placement inline or move the class to a module"
            ) from error


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Show an empty main module to multiprocessing, which would otherwise run the user's script in every child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _child_main(setup: _Setup, control: Connection, supervisor: int) -> None:
    """Be one role until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the supervisor decides
    for number in (signal.SIGTERM, signal.SIGHUP):
        _leave_to_supervisor(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
    os.setpgid(0, 0)  # so that what the role starts can be ended with it
    name_process(setup.name)
    set_threads(setup.threads)
    if setup.background:
        be_nice()
    note_last_words(setup.last_words)
    failpoints.arm(setup.faults, setup.name, setup.ports.life)
    history.begin(setup.history, setup.name, setup.ports.life)
    lock = threading.Lock()

    def say(what: Answer | Report) -> None:
        # A supervisor that is gone is the business of the thread that listens to it.
        with lock, contextlib.suppress(OSError):
            control.send(what)

    alarm, ring = multiprocessing.Pipe(duplex=False)
    waiter = Waiter(alarm)

    def wait(waitables: Sequence[Any], seconds: float | None) -> None:
        if waiter.wait(waitables, seconds):
            alarm.recv_bytes()

    try:
        nodes = [pickle.loads(payload) for payload in setup.payloads]
    except Exception as error:
        say(failed(error))
        return
    worker = Worker(nodes, setup.ports.open, wait, say)

    def relay() -> None:
        """Pass commands on and report, whatever the role is doing; end with the supervisor."""
        watched = [control, *_death_notice(supervisor)]
        try:
            while True:
                while ready := connection.wait(watched, _HEARTBEAT_S):
                    if control not in ready:
                        raise EOFError
                    worker.command(*control.recv())
                    ring.send_bytes(b"!")
                for report in worker.reports():
                    say(report)
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # with all that the role has started

    threading.Thread(target=relay, name="relay", daemon=True).start()
    worker.run()


def _leave_to_supervisor(number: int) -> None:
    """Let a signal pass here; a process that this one forks heeds it as any other does."""
    own = os.getpid()

    def heed(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(number, heed)


def _death_notice(pid: int) -> list[Any]:
    """Return what becomes readable when that process ends, where the system has it.

    The pipe to it tells the same, unless a process that it forked holds the pipe open.
    """
    try:
        return [os.pidfd_open(pid)]
    except (AttributeError, OSError):
        return []
