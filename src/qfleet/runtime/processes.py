"""The placement for one machine: every role in a process of its own, edges in shared memory, this process supervising.

Children come from a forkserver that has preloaded torch and qfleet (0.01 s each instead of 4 s), or are spawned where a
role asks for a process that never forked (CUDA). They never run the user's main module: a script needs no guard.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from qfleet.core import failpoints
from qfleet.core.errors import ConfigError
from qfleet.core.protocols import Report
from qfleet.core.types import Notice
from qfleet.core.waiting import Waiter
from qfleet.runtime import checkpoint
from qfleet.runtime.channels import Ports, StreamLevels, edge_stem, lay_out
from qfleet.runtime.graph import Graph, Node, ends, open_handles
from qfleet.runtime.groups import Groups
from qfleet.runtime.memory import RunFolder
from qfleet.runtime.restarts import Restarts
from qfleet.runtime.streams import desert
from qfleet.runtime.supervisor import Member, SupervisedPlacement
from qfleet.runtime.watchdog import Standstill, Watchdog
from qfleet.runtime.worker import Answer, Command, OpenEnds, Worker, failed, name_process, set_threads

_HEARTBEAT_S = 0.5
_STOP_S, _KILL_S = 5.0, 5.0
"""How long a child may take to close its role, and to be gone after SIGKILL."""
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to end."""
_CULPRIT_S = 0.3
"""How long the death is waited for that one of a group complains of."""
_CROWDED = 4
"""Processes for each core from which on a person is told."""
_CALLS = 3
"""How many calls are told of a process that crashed."""
_BACKGROUND = 10
"""How nice processes in the background are to the others: about a tenth of their weight."""


class ProcessPlacement(SupervisedPlacement):
    """Runs each node of a graph in its own process.

    `spawn` names the kinds of roles that must not be forked; `threads` gives the threads of torch and OpenMP by kind,
    one where not given. A role that holds a keep and dies or hangs is begun anew, `restarts` times if its deaths follow
    each other quickly; those of a kind in `groups` live and die together, so that all of them are, or all but one if
    the kind is in `dwindling`, too. It hangs when one of its steps takes longer than `stall` seconds; those of kinds in
    `brief`, whose steps cost little to be made again, also when a person waits for the end of the run. Kinds in
    `background` leave a core to any other that wants it. In `lockstep` roles step one at a time, in inline's order.
    """

    name = "processes"

    def __init__(
        self,
        graph: Graph,
        spawn: Collection[str] = (),
        threads: Mapping[str, int] | None = None,
        groups: Collection[str] = (),
        dwindling: Collection[str] = (),
        background: Collection[str] = (),
        brief: Collection[str] = (),
        restarts: int = 5,
        stall: float = 60.0,
        lockstep: bool = False,
    ) -> None:
        super().__init__(graph, lockstep)
        failpoints.arm(failpoints.wanted(), "supervisor", everyone=False)
        payloads = [_payload(node) for node in graph.nodes]
        self._mortal = {node.name for node in graph.nodes if not any(end.side == "keep" for end in ends(node.handles))}
        self._nodes = {node.name: node for node in graph.nodes}
        self._groups = Groups(graph, groups, dwindling)
        self._brief = {node.name for node in graph.nodes if node.kind in brief}
        self._restarts, self._watchdog, self._standstill = Restarts(restarts), Watchdog(stall), Standstill()
        self._folder = RunFolder()
        self._setups: dict[str, _Setup] = {}
        self._children: dict[str, _Child] = {}
        self._due: dict[str, float] = {}
        """When the dead are begun anew."""
        self._leaving: set[str] = set()
        """Who is not begun anew when its process has ended."""
        self._left: list[Node] = []
        """Who has left for good."""
        self._warn_of_crowd()
        atexit.register(self.close)  # before multiprocessing's own handler, which would wait for the children
        try:
            ports, self._ports = lay_out(graph, self._folder.path)
            self._levels = StreamLevels(graph, self._folder.path)
            self._ends = OpenEnds(self._ports.open)
            _preload(graph)
            for node, payload in zip(graph.nodes, payloads, strict=True):
                method = "spawn" if node.kind in spawn else "forkserver"
                count = (threads or {}).get(node.kind, 1)
                behind = node.kind in background
                last_words = self._folder.path / f"{node.name}.last_words"
                self._setups[node.name] = _Setup(
                    node.name, payload, ports[node.name], method, count, behind, last_words
                )
            for name, setup in self._setups.items():
                self._children[name] = _Child(setup)
            self._await("built")
        except BaseException:
            self.close()
            raise

    def open(self, end: Any) -> Any:
        """Return the live handle of an end that the caller holds."""
        return self._ends.open(end)

    def pids(self) -> dict[str, int]:
        """Return the process numbers of the living by node name, for tools that watch or kill."""
        return {name: child.pid for name, child in self._children.items()}

    def _warn_of_crowd(self) -> None:
        cores, count = len(os.sched_getaffinity(0)), len(self.crew)
        if count > _CROWDED * cores:
            text = f"{count} processes share {cores} cores: they will wait for each other; fewer actors may be faster"
            self._incidents.append(Notice("supervisor", 0, "crowded", text))

    def _tell(self, member: Member, command: Command, argument: str) -> None:
        if member.name in self._children:
            self._children[member.name].tell(command, argument)

    def _listen(self, seconds: float) -> list[tuple[Member, Answer | Report]]:
        self._watch()  # before births: until they are told, members still have the reports of the dead
        heard: list[tuple[Member, Answer | Report]] = [(member, Answer("reborn")) for member in self._begin_due()]
        until = min([time.monotonic() + seconds, *self._due.values()])
        items = [item for child in self._children.values() for item in child.waitables()]
        connection.wait(items, 0.0 if heard else max(0.0, until - time.monotonic()))
        heard += self._said()
        until = time.monotonic() + _CULPRIT_S
        while _unexplained(heard) and (left := until - time.monotonic()) > 0:
            connection.wait([item for child in self._children.values() for item in child.sentinels()], left)
            heard += self._said()
        return sorted(heard, key=lambda one: isinstance(one[1], Answer) and one[1].lost)  # who is gone comes first

    def _said(self) -> list[tuple[Member, Answer | Report]]:
        """Return what came from the children by now."""
        heard, now = [], time.monotonic()
        for member in self.crew:
            if member.name in self._children:
                said = self._children[member.name].hear()
                heard += [(member, self._judged(member, item)) for item in said]
                if said:
                    self._watchdog.heard(member.name, now)
        return heard

    def _judged(self, member: Member, heard: Answer | Report) -> Answer | Report:
        """Return what one of a group said; that its peers are gone is no fault of its own, but the end of its life."""
        if isinstance(heard, Answer) and heard.lost and self._groups.drawn[member.name] > 1:
            return Answer("died", heard.cause, lost=True)
        return heard

    def _replaceable(self, member: Member) -> bool:
        return member.name not in self._mortal

    def _bury(self, member: Member, cause: str) -> str:
        if not self._replaceable(member):
            return cause
        child = self._children.pop(member.name)
        child.kill()  # what it had started
        child.join(time.monotonic() + _KILL_S)
        child.release()
        if member.name in self._leaving:
            self._leave(member)
            return ""
        if member.name in self._due:
            return ""  # it dies with its group
        if not member.built and member.life > 0:
            return f"{cause}; that was the second try"  # what never worked will not begin to
        group = self._groups.of(member.name)
        delay = self._restarts.delay(group[0], time.monotonic())
        if delay is None:
            return f"{cause}; that was death {self._restarts.in_a_row(group[0])} within a short time"
        due = time.monotonic() + delay  # the same for all: who is begun a moment earlier keeps the others from it
        for name in group:
            self._due[name] = due
            if name in self._children:
                self._children[name].condemn(f"{member.name} of its group died")
        if (leaver := self._groups.leaver(member.name)) is not None:
            self._send_away(leaver, member, cause)
        return ""

    def _send_away(self, leaver: str, dead: Member, cause: str) -> None:
        """Let one of a group, who dies with it, not come back."""
        del self._due[leaver]
        self._leaving.add(leaver)
        left, drawn = len(self._groups.of(leaver)) - 1, self._groups.drawn[leaver]
        text = f"{dead.name} died ({cause}): its group goes on with {left} of {drawn}, without {leaver}"
        self._incidents.append(Notice("supervisor", 0, "fewer", text))
        if leaver == dead.name:
            self._leave(dead)

    def _leave(self, member: Member) -> None:
        """Go on without a role whose process has ended; those who send to it and its group must know."""
        self._leaving.remove(member.name)
        self.crew.remove(member)
        node = self._nodes[member.name]
        self._left.append(node)
        for end in ends(node.handles):
            if end.side == "receiver":
                desert(edge_stem(self._folder.path, end.edge))
        for name in self._groups.leave(member.name):
            self._setups[name].ports.gone += 1

    def _begin_due(self) -> list[Member]:
        """Begin those of the dead anew whose time has come; returns them."""
        now = time.monotonic()
        begun = [
            member
            for member in self.crew
            if now >= self._due.get(member.name, math.inf)
            and not any(name in self._children for name in self._groups.of(member.name))
        ]
        for member in begun:
            del self._due[member.name]
            setup = self._setups[member.name]
            setup.ports.life += 1
            self._children[member.name] = _Child(setup)
            self._watchdog.heard(member.name, time.monotonic())
        return begun

    def _watch(self) -> None:
        """Kill what hangs, and say when nothing moves."""
        now = time.monotonic()
        waited = 0.0 if self._hurried_at is None else now - self._hurried_at
        self._watchdog.listening(now)
        for member in self.crew:
            child = self._children.get(member.name)
            replaceable = self._replaceable(member)
            hurried_s = waited if member.name in self._brief else 0.0
            verdict = self._watchdog.verdict(member.name, member.report, replaceable, now, self._pausing, hurried_s)
            if child is not None and verdict:
                child.condemn(verdict)
        if self._running:
            reports = [member.report for member in self.crew if not member.done]
            text = self._standstill.look(reports, self._levels.read(), now)
            if text:
                self._incidents.append(Notice("supervisor", 0, "standstill", text))

    def _save_own_ends(self, directory: Path) -> None:
        self._ends.save(directory, "caller")
        for node in self._left:
            self._save_for(node, directory)

    def _save_for(self, node: Node, directory: Path) -> None:
        """Write what one who left would begin with in a resumed run, which has all of the group again."""
        first = next(name for name, other in self._nodes.items() if other.kind == node.kind)
        checkpoint.copy_state(directory, first, node.name)
        own = OpenEnds(self._setups[node.name].ports.open)
        open_handles(node.handles, own.open)
        own.drain()  # nobody would wait for these draws with it
        own.save(directory, node.name)

    def _restore_own_ends(self, directory: Path) -> None:
        self._ends.restore(directory, "caller")

    def _end(self) -> None:
        atexit.unregister(self.close)
        children = self._children.values()
        for means, patience_s in ((_Child.stop, _STOP_S), (_Child.kill, _KILL_S)):
            for child in children:
                means(child)
            until = time.monotonic() + patience_s
            for child in children:
                child.join(until)
        for child in children:
            child.release()
        for setup in self._setups.values():
            setup.ports.close()
        with contextlib.suppress(AttributeError):  # laying out the edges may be what failed
            self._ports.close()
        self._folder.remove()


def _unexplained(heard: list[tuple[Member, Answer | Report]]) -> bool:
    """Return whether roles said that somebody is gone, and nobody is known to be."""
    deaths = [item.lost for _, item in heard if isinstance(item, Answer) and item.what == "died"]
    return bool(deaths) and all(deaths)


@dataclass(frozen=True)
class _Setup:
    """What a child is told at its birth; the same in every life, but for the number of the life in its ports."""

    name: str
    payload: bytes
    ports: Ports
    method: str
    threads: int
    background: bool
    last_words: Path
    """Where a crash writes what the process was doing."""
    faults: str = field(default_factory=failpoints.wanted)
    """Which failpoints are armed; a forkserver's environment is older."""


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
        return ([] if self._deaf else [self._control]) + self.sentinels()

    def sentinels(self) -> list[Any]:
        """Return what becomes readable when the child dies, unless that is known."""
        return [] if self._ended else [self._process.sentinel]

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
        return f"its process was killed by {signal.Signals(-code).name}{when}{_last_words(self._last_words)}"

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


def _last_words(path: Path) -> str:
    """Return where a process was when it crashed, its innermost calls; empty if it did not say."""
    with contextlib.suppress(OSError):
        calls = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.startswith("  File ")]
        return f"; it was at {', called from '.join(calls[:_CALLS])}" if calls else ""
    return ""


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
        os.nice(_BACKGROUND)
    with contextlib.suppress(OSError):  # the run has ended meanwhile
        faulthandler.enable(setup.last_words.open("w"), all_threads=False)
    failpoints.arm(setup.faults, setup.name, setup.ports.life)
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
        node = pickle.loads(setup.payload)
    except Exception as error:
        say(failed(error))
        return
    worker = Worker(node, setup.ports.open, wait, say)

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
                say(worker.report())
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
