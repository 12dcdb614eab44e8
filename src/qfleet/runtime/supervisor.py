"""What every placement with roles elsewhere does alike: command them, hear from them, pause, save, and fail once."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from qfleet.core.errors import CheckpointError, ConfigError, RoleFailure
from qfleet.core.protocols import Incident, Report
from qfleet.core.role import WORKED, Status
from qfleet.core.types import Notice
from qfleet.runtime.answers import Answer, Command
from qfleet.runtime.graph import Graph, Node
from qfleet.runtime.host import Host
from qfleet.runtime.writing import CrewWriting

_LISTEN_S = 0.1
_NUDGE_S = 0.2
"""How long it must be quiet before roles that are paused get one more round for the sake of those that are not."""
_AFTERMATH_S = 0.3
"""How long a first failure waits for the death that may have caused it."""


@dataclass
class Member:
    """One role as its supervisor sees it, with those that are in its process."""

    name: str
    report: Report
    """The newest one."""
    done: bool = False
    life: int = 0
    """How often it was begun anew."""
    died_at: float | None = None
    """When its last life ended, by `time.monotonic`, until the next one is ready."""
    cause: str = ""
    """Why its last life ended."""
    built: bool = False
    """Whether it was ready in any of its lives."""
    ready_at: float | None = None
    """When this life was ready."""
    lived_s: float = 0.0
    """How long its last life had been ready when it ended."""
    guests: dict[int, Report] = field(default_factory=dict)
    """The newest reports of others of its kind that are in its process, by their indices."""

    @property
    def reports(self) -> list[Report]:
        """The newest reports of all that are in its process."""
        return [self.report, *self.guests.values()]

    def hear(self, report: Report) -> None:
        """Take in a report of one of these."""
        if report.host is None:
            self.report = report
        else:
            self.guests[report.index] = report

    def begin(self) -> None:
        """Be one of whom nothing has been heard yet."""
        self.done, self.guests = False, {}
        self.report = Report(self.report.kind, self.report.index, "starting", {}, 0.0, {})


def starting(name: str, kind: str, index: int) -> Member:
    """Return a member of which nothing has been heard yet."""
    return Member(name, Report(kind, index, "starting", {}, 0.0, {}))


@dataclass
class Turn:
    """A role elsewhere that steps only when it is told to, as the host of a lock-step run sees it."""

    node: Node
    take: Callable[[], Status]
    """Has the role step once, and waits for that."""
    status: Status = WORKED

    def step(self) -> None:
        """Have the role step once."""
        self.status = self.take()

    def waited(self, seconds: float) -> None:
        """Do nothing: its worker accounts for its time."""


class SupervisedPlacement(ABC):
    """A placement whose roles run in workers; a subclass says how to reach them.

    In `lockstep` they step one at a time, in the order in which one process would step them.
    """

    name: str

    def __init__(self, graph: Graph, lockstep: bool = False) -> None:
        self.crew = [starting(node.name, node.kind, node.index) for node in graph.nodes]
        turns = [Turn(node, partial(self._step, member)) for node, member in zip(graph.nodes, self.crew, strict=True)]
        self._turns = Host(turns) if lockstep else None
        self._running = self._pausing = False
        self._closed = False
        self._hurried_at: float | None = None
        """Since when a person waits for the end, by `time.monotonic`."""
        self._incidents: list[Incident | Notice] = []
        self._writing = CrewWriting()
        """What becomes of the last checkpoint."""

    @abstractmethod
    def _tell(self, member: Member, command: Command, argument: str) -> None:
        """Send a command; a worker that is dead or not begun anew yet is no error here."""

    @abstractmethod
    def _listen(self, seconds: float) -> list[tuple[Member, Answer | Report]]:
        """Return what came from the workers, waiting at most so long for the first."""

    @abstractmethod
    def _capture_own_ends(self, directory: Path) -> list[Callable[[], None]]:
        """Take the state of the ends of the caller; return what writes it when the roles have written theirs."""

    @abstractmethod
    def _restore_own_ends(self, directory: Path) -> None:
        """Continue from it."""

    @abstractmethod
    def _end(self) -> None:
        """End all workers and give everything back; called once."""

    def _reached(self, member: Member) -> bool:
        """Return whether all commands are known to have come to a worker."""
        return True

    def _replaceable(self, member: Member) -> bool:
        """Return whether a dead role can be begun anew."""
        return False

    def _bury(self, member: Member, death: Answer) -> str:
        """Prepare the next life of a role that just died; returns why there will be none, empty if there will be one.

        When that life begins, `_listen` must say "reborn" of it.
        """
        return death.cause

    @property
    def done(self) -> bool:
        """Whether every role has finished."""
        return all(member.done for member in self.crew)

    def advance(self) -> None:
        """Hear from the roles for at most a tenth of a second; raises the one error that names a failed role.

        In lock-step: let them step one round, as inline does.
        """
        if self._turns is not None:
            self._turns.round()
            return
        if not self._running:
            self._running = True
            self._tell_all("run")
        self._hear(_LISTEN_S)

    def reports(self) -> list[Report]:
        """Return the newest report of every role; in lock-step that of this moment."""
        if self._turns is None or self._closed:
            return [report for member in self.crew for report in member.reports]
        fresh = self._ask("report", self.crew)
        return [fresh[member.name].report or member.report for member in self.crew]

    def incidents(self) -> list[Incident | Notice]:
        """Return what went wrong and did not end the run, since it was last asked."""
        incidents, self._incidents = self._incidents, []
        return incidents

    def pause(self) -> None:
        """Stop all roles between two steps; the next `advance` lets them go on."""
        if self._running:
            self._running = False  # first, so that a role that is begun anew meanwhile is not let run
            self._pause()

    def hurry(self) -> None:
        """Wait no longer for steps that take long: a person wants the run to end; safe to call in a signal handler."""
        self._hurried_at = self._hurried_at or time.monotonic()

    def attend(self, seconds: float) -> None:
        """Hear from the roles for at most so long."""
        self._hear(seconds)

    def save(self, directory: Path) -> CrewWriting:
        """Take the states of all roles, paused, and what is on its way between them."""
        self.pause()
        self._writing = CrewWriting()
        self._ask("save", self.crew, str(directory.resolve()))
        self._writing.taken(self._capture_own_ends(directory))
        return self._writing

    def restore(self, directory: Path) -> None:
        """Continue from what was written there for the same graph; streams are closed anew by their senders."""
        self._ask("restore", self.crew, str(directory.resolve()))
        self._restore_own_ends(directory)

    def close(self) -> None:
        """End every role and give everything back; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._end()
            self._writing.abandon()

    def _tell_all(self, command: Command, argument: str = "") -> None:
        for member in self.crew:
            self._tell(member, command, argument)

    def _step(self, member: Member) -> Status:
        """Have one role step once."""
        return self._ask("step", [member])[member.name].status

    def _ask(self, command: Command, members: Sequence[Member], argument: str = "") -> dict[str, Answer]:
        """Have roles carry out a command; returns their answers by name. One that is begun anew is told again."""

        def tell(member: Member) -> None:
            self._tell(member, command, argument)

        for member in members:
            tell(member)
        return self._await(command, members, tell)

    def _await(
        self, what: str, members: Sequence[Member] = (), tell_again: Callable[[Member], None] | None = None
    ) -> dict[str, Answer]:
        """Wait until these roles, or all, have answered so; one that is begun anew meanwhile is told again."""
        awaited = {member.name for member in members or self.crew}
        answers: dict[str, Answer] = {}
        while any(member.name in awaited - answers.keys() for member in self.crew):  # one may leave for good
            heard = [(member, answer) for member, answer in self._hear(_LISTEN_S) if member.name in awaited]
            for member, answer in heard:
                if answer.what == what:
                    answers[member.name] = answer
                elif answer.what == "reborn" and what == "step" and self._hurried_at is not None:
                    answers[member.name] = Answer(what)  # its turn is over: it would only hang again
                elif answer.what == "reborn" and tell_again is not None:
                    answers.pop(member.name, None)
                    tell_again(member)
        return answers

    def _pause(self) -> None:
        """Bring every role to a stop between two steps.

        A role inside a collective cannot stop before its peers have taken their part, and these may need a batch
        from a role that is paused already. So whenever it stays quiet, all that are paused get one more round, unless
        one that moves may not have heard of the pause. The dead stand still, and so do those that are begun anew.
        """
        self._pausing = True
        moving = {member.name for member in self.crew if member.died_at is None}
        self._tell_all("pause")
        while moving:
            heard = [(m.name, answer.what) for m, answer in self._hear(_NUDGE_S)]
            stopped = {name for name, what in heard if what in ("pause", "died")}
            moving -= stopped
            if not stopped and moving and all(self._reached(m) for m in self.crew if m.name in moving):
                nudged = [m for m in self.crew if m.name not in moving and m.died_at is None]
                moving |= {member.name for member in nudged}
                for member in nudged:
                    self._tell(member, "pause", "")
        self._pausing = False

    def _hear(self, seconds: float) -> list[tuple[Member, Answer]]:
        """Return the answers that came; note reports and ends of roles, and raise if a role failed."""
        if self._closed:
            raise RuntimeError("the placement is closed")
        answers = []
        for member, heard in self._listen(seconds):
            if isinstance(heard, Report):
                member.hear(heard)
                continue
            answers.append((member, heard))
            self._note(member, heard)
        failures = [(member, answer) for member, answer in answers if answer.what == "failed"]
        for member, answer in answers:
            if answer.what == "died" and (end := self._bury(member, answer)):
                failures.append((member, dataclasses.replace(answer, cause=end)))
        if failures:
            self._fail(failures)
        return answers

    def _note(self, member: Member, answer: Answer) -> None:
        """Keep a member as its worker says it is."""
        if answer.what == "done":
            member.done = True
        elif answer.what == "save":
            self._writing.begun(member.name)
            if answer.cause:
                self._writing.ended(member.name, CheckpointError(answer.cause))
        elif answer.what == "written":
            self._writing.ended(member.name, CheckpointError(answer.cause) if answer.cause else None)
        elif answer.what == "died":
            self._writing.died(member.name)
            self._tell_incident(member)
            member.died_at, member.cause = time.monotonic(), answer.cause
            member.lived_s = 0.0 if member.ready_at is None else member.died_at - member.ready_at
            member.ready_at = None
            if self._turns is not None:
                text = f"{member.name} died: from here on the numbers of this run are not those of an inline one"
                self._incidents.append(Notice("supervisor", 0, "lockstep", text))
        elif answer.what == "reborn":
            member.life += 1
            member.begin()
            for turn in self._turns.hosted if self._turns is not None else ():
                turn.status = WORKED if turn.node.name == member.name else turn.status  # it may have been done before
            if self._running:
                self._tell(member, "run", "")
        elif answer.what == "built":
            self._tell_incident(member)
            member.died_at, member.built, member.ready_at = None, True, time.monotonic()

    def _tell_incident(self, member: Member) -> None:
        """Tell of a member's last death, if its next life was not ready before."""
        if member.died_at is not None:
            report, seconds = member.report, time.monotonic() - member.died_at
            self._incidents.append(Incident(report.kind, report.index, member.cause, member.life, seconds))

    def _fail(self, failures: list[tuple[Member, Answer]]) -> NoReturn:
        """End the run with one error; a death that comes with errors of others is their cause."""
        until = time.monotonic() + _AFTERMATH_S
        while (left := until - time.monotonic()) > 0:
            later = [(member, answer) for member, answer in self._listen(left) if isinstance(answer, Answer)]
            failures += [
                (member, answer)
                for member, answer in later
                if answer.what == "failed" or (answer.what == "died" and not self._replaceable(member))
            ]
        died = [(member, answer) for member, answer in failures if answer.what == "died"]
        member, answer = (died or failures)[0]
        self.close()
        error: ConfigError | RoleFailure
        if answer.exit_code == ConfigError.exit_code:
            error = ConfigError(f"{answer.cause} (found by {member.name})")
        else:
            error = RoleFailure(member.report.kind, member.report.index, answer.cause, died=bool(died))
        if answer.trace:
            error.add_note(answer.trace)
        raise error
