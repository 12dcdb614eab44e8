"""What placements do alike that begin dead roles anew: notice a death, bury the dead, wait, begin the next life."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack

from qfleet.core import failpoints
from qfleet.core.protocols import Report
from qfleet.core.types import Notice
from qfleet.runtime import checkpoint
from qfleet.runtime.answers import Answer, Command
from qfleet.runtime.channels import Ports, StreamLevels, edge_stem
from qfleet.runtime.graph import Graph, Node, ends, facing, open_handles, received_streams, work_ends
from qfleet.runtime.groups import Groups
from qfleet.runtime.restarts import Restarts
from qfleet.runtime.streams import desert
from qfleet.runtime.supervisor import Member, SupervisedPlacement
from qfleet.runtime.watchdog import Standstill, Watchdog, has_nothing_to_do
from qfleet.runtime.worker import OpenEnds

STOP_S, KILL_S = 5.0, 5.0
"""How long a life may take to close its role, and to be gone after it was killed."""
_QUICK_S = 10.0
"""A role that works for so long before it dies again is worth another life, however often that happens."""
_CLOSING_S = 1.0
"""How long a role whose environment broke may take to close it, and what that may have started."""
_CULPRIT_S = 0.3
"""How long the death is waited for that one of a group complains of."""


class Life(Protocol):
    """One life of a role, as the supervisor holds it."""

    pid: int

    def tell(self, command: Command, argument: str) -> None:
        """Send a command; that it is dead is noticed by `hear`."""

    def hear(self) -> list[Answer | Report]:
        """Return what it said, and that it died if it did without saying why."""

    def condemn(self, verdict: str) -> None:
        """Kill it; it will be said to have died of this, unless it is dead already."""

    def stop(self) -> None:
        """Ask the role to close."""

    def kill(self) -> None:
        """End it."""

    def join(self, until: float) -> None:
        """Wait for its end, at most until then."""

    def release(self) -> None:
        """Give back what belongs to the dead, and end what it may have started."""


class Revival(TypedDict, total=False):
    """How deaths are dealt with."""

    groups: Collection[str]
    """Kinds whose roles live and die together, so that all of them are begun anew."""
    dwindling: Collection[str]
    """Those of them that go on with one less after each death."""
    brief: Collection[str]
    """Kinds whose steps cost little to be made again: they are not waited for when a person waits for the end."""
    restarts: int
    """How many deaths after short lives are survived in a row; 5 where not given."""
    stall: float
    """Seconds that a step may take, 60 where not given: a role that takes longer hangs, and is taken for dead."""
    lockstep: bool
    """Whether roles step one at a time, in inline's order."""


class RevivingPlacement(SupervisedPlacement):
    """A placement whose roles outlive their deaths, if they hold a keep; a subclass says what a life is."""

    _ends: OpenEnds
    """The caller's."""
    _levels: StreamLevels

    def __init__(self, graph: Graph, **revival: Unpack[Revival]) -> None:
        super().__init__(graph, revival.get("lockstep", False))
        failpoints.arm(failpoints.wanted(), "supervisor", everyone=False)
        self._mortal = {node.name for node in graph.nodes if not any(end.side == "keep" for end in ends(node.handles))}
        self._nodes = {node.name: node for node in graph.nodes}
        self._groups = Groups(graph, revival.get("groups", ()), revival.get("dwindling", ()))
        self._brief = {node.name for node in graph.nodes if node.kind in revival.get("brief", ())}
        self._restarts, self._standstill = Restarts(revival.get("restarts", 5), _QUICK_S), Standstill(facing(graph))
        self._watchdog = Watchdog(revival.get("stall", 60.0))
        self._received, self._work = received_streams(graph), work_ends(graph)
        self._done_before: dict[str, int] = {}
        """What roles that died had done when their present lives began."""
        self._ports: dict[str, Ports] = {}
        self._lives: dict[str, Life] = {}
        self._due: dict[str, float] = {}
        """When the dead are begun anew."""
        self._leaving: set[str] = set()
        """Who is not begun anew when its life has ended."""
        self._left: list[Node] = []
        """Who has left for good."""

    @abstractmethod
    def _begin(self, name: str) -> Life:
        """Begin a life of a role, with its ports as they are now."""

    @abstractmethod
    def _wait_for_news(self, seconds: float) -> None:
        """Wait until any life has said something or ended, at most so long."""

    def open(self, end: Any) -> Any:
        """Return the live handle of an end that the caller holds."""
        return self._ends.open(end)

    def pids(self) -> dict[str, int]:
        """Return the process numbers of the living by node name, where they are known, for tools that watch or kill."""
        return {name: life.pid for name, life in self._lives.items() if life.pid}

    def reports(self) -> list[Report]:
        """Return the newest report of every role, with how many messages wait for it."""
        reports = super().reports()
        if self._closed:
            return reports
        waiting = {level.edge: level.sent - level.taken for level in self._levels.read()}
        queues = {name: sum(waiting[edge] for edge in edges) for name, edges in self._received.items()}
        return [replace(report, queue=queues.get(f"{report.kind}-{report.index}")) for report in reports]

    def _tell(self, member: Member, command: Command, argument: str) -> None:
        if member.name in self._lives:
            self._lives[member.name].tell(command, argument)

    def _listen(self, seconds: float) -> list[tuple[Member, Answer | Report]]:
        self._watch()  # before births: until they are told, members still have the reports of the dead
        heard: list[tuple[Member, Answer | Report]] = [(member, Answer("reborn")) for member in self._begin_due()]
        until = min([time.monotonic() + seconds, *self._due.values()])
        self._wait_for_news(0.0 if heard else max(0.0, until - time.monotonic()))
        heard += self._said()
        until = time.monotonic() + _CULPRIT_S
        while _unexplained(heard) and (left := until - time.monotonic()) > 0:
            self._wait_for_news(left)
            heard += self._said()
        return sorted(heard, key=lambda one: isinstance(one[1], Answer) and one[1].lost)  # who is gone comes first

    def _said(self) -> list[tuple[Member, Answer | Report]]:
        """Return what came from the living by now."""
        heard, now = [], time.monotonic()
        for member in self.crew:
            if member.name in self._lives:
                said = self._lives[member.name].hear()
                ready = member.built or any(isinstance(item, Answer) and item.what == "built" for item in said)
                heard += [(member, self._judged(member, item, ready)) for item in said]
                if said:
                    self._watchdog.heard(member.name, now)
        return heard

    def _judged(self, member: Member, heard: Answer | Report, ready: bool) -> Answer | Report:
        """Return what a role said; of a failure that is not its own it has died: its peers are gone, or its environment
        broke, and the role was ready before."""
        if isinstance(heard, Answer) and heard.lost and self._groups.drawn[member.name] > 1:
            return Answer("died", heard.cause, lost=True)
        if isinstance(heard, Answer) and heard.fault and ready and self._replaceable(member):
            self._lives[member.name].join(time.monotonic() + _CLOSING_S)
            return replace(heard, what="died", cause=heard.cause.rstrip("."))
        return heard

    def _replaceable(self, member: Member) -> bool:
        return member.name not in self._mortal

    def _bury(self, member: Member, death: Answer) -> str:
        cause = death.cause
        if not self._replaceable(member):
            return cause
        kill_all([self._lives.pop(member.name)])
        if member.name in self._leaving:
            self._leave(member)
            return ""
        if member.name in self._due:
            return ""  # it dies with its group
        if not member.built and member.life > 0:
            return f"{cause}; that was the second try"  # what never worked will not begin to
        group = self._groups.of(member.name)
        delay = self._restarts.delay(group[0], 0.0 if self._in_vain(member, death) else member.lived_s)
        if delay is None:
            return f"{cause}; {self._restarts.too_many(group[0])}"
        due = time.monotonic() + delay  # the same for all: who is begun a moment earlier keeps the others from it
        for name in group:
            self._due[name] = due
            if name in self._lives:
                self._lives[name].condemn(f"{member.name} of its group died")
        if (leaver := self._groups.leaver(member.name)) is not None:
            self._send_away(leaver, member, cause)
        return ""

    def _in_vain(self, member: Member, death: Answer) -> bool:
        """Return whether a life ended with nothing done, however long it was: the next one may end like it.

        Who had nothing to do is not to blame.
        """
        idle = has_nothing_to_do(member.report) and not death.fault
        done = self._done(member.name)
        return not idle and done is not None and done == self._done_before.get(member.name, 0)

    def _done(self, name: str) -> int | None:
        """Return how many messages have come from a role or were used up by it, in all of its lives; None if its work
        cannot be told by that."""
        levels = {level.edge: level for level in self._levels.read()}
        done = [(levels[end.edge], end.side) for end in self._work.get(name, ())]
        return sum(level.sent if side == "sender" else level.taken for level, side in done) if done else None

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
        """Go on without a role whose life has ended; those who send to it and its group must know."""
        self._leaving.remove(member.name)
        self.crew.remove(member)
        node = self._nodes[member.name]
        self._left.append(node)
        for end in ends(node.handles):
            if end.side == "receiver":
                desert(edge_stem(self._ports[member.name].folder, end.edge))
        for name in self._groups.leave(member.name):
            self._ports[name].gone += 1

    def _begin_due(self) -> list[Member]:
        """Begin those of the dead anew whose time has come; returns them."""
        now = time.monotonic()
        begun = [
            member
            for member in self.crew
            if now >= self._due.get(member.name, math.inf)
            and not any(name in self._lives for name in self._groups.of(member.name))
        ]
        for member in begun:
            del self._due[member.name]
            ports = self._ports[member.name]
            ports.life, ports.planned = ports.life + 1, False
            self._done_before[member.name] = self._done(member.name) or 0
            self._lives[member.name] = self._begin(member.name)
            self._watchdog.heard(member.name, time.monotonic())
        return begun

    def _watch(self) -> None:
        """Kill what hangs, and say when nothing moves."""
        now = time.monotonic()
        waited = 0.0 if self._hurried_at is None else now - self._hurried_at
        self._watchdog.listening(now)
        for member in self.crew:
            life = self._lives.get(member.name)
            replaceable = self._replaceable(member)
            hurried_s = waited if member.name in self._brief else 0.0
            report = member.report
            if report.phase == "starting" and member.ready_at is not None:
                report = replace(report, phase="running", step_s=now - member.ready_at)  # it has not reported since
            verdict = self._watchdog.verdict(member.name, report, replaceable, now, self._pausing, hurried_s)
            if life is not None and verdict:
                life.condemn(verdict)
        if self._running:
            reports = [report for member in self.crew if not member.done for report in member.reports]
            done = [f"{one.kind}-{one.index}" for member in self.crew if member.done for one in member.reports]
            text = self._standstill.look(reports, self._levels.read(), now, done)
            if text:
                self._incidents.append(Notice("supervisor", 0, "standstill", text))

    def _capture_own_ends(self, directory: Path) -> list[Callable[[], None]]:
        parts = [self._ends.capture(directory, "caller").write]
        return parts + [part for node in self._left for part in self._capture_for(node, directory)]

    def _capture_for(self, node: Node, directory: Path) -> list[Callable[[], None]]:
        """Return what writes the state of one who left, who is there again in a resumed run."""
        first = next(name for name, other in self._nodes.items() if other.kind == node.kind)
        own = OpenEnds(self._ports[node.name].open)
        open_handles(node.handles, own.open)
        own.drain()  # nobody would wait for these draws with it
        return [partial(checkpoint.copy_state, directory, first, node.name), own.capture(directory, node.name).write]

    def _restore_own_ends(self, directory: Path) -> None:
        self._ends.restore(directory, "caller")

    def _end_lives(self) -> None:
        end_all(self._lives.values())


def end_all(lives: Collection[Life]) -> None:
    """Have roles close, and kill those that do not end by themselves."""
    try:
        for life in lives:
            life.stop()
        _join(lives, STOP_S)
    finally:  # a person may not want to wait for them
        kill_all(lives)


def kill_all(lives: Collection[Life]) -> None:
    """End lives at once; what their roles keep is as it was between two steps, or in the middle of one."""
    for life in lives:
        life.kill()
    _join(lives, KILL_S)
    for life in lives:
        life.release()


def _join(lives: Collection[Life], patience_s: float) -> None:
    until = time.monotonic() + patience_s
    for life in lives:
        life.join(until)


def _unexplained(heard: list[tuple[Member, Answer | Report]]) -> bool:
    """Return whether roles said that somebody is gone, and nobody is known to be."""
    deaths = [item.lost for _, item in heard if isinstance(item, Answer) and item.what == "died"]
    return bool(deaths) and all(deaths)
