"""What every placement with roles elsewhere does alike: command them, hear from them, pause, save, and fail once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from qfleet.core.errors import ConfigError, RoleFailure
from qfleet.core.protocols import Report
from qfleet.runtime.graph import Graph
from qfleet.runtime.worker import Answer, Command

_LISTEN_S = 0.1
_NUDGE_S = 0.2
"""How long it must be quiet before roles that are paused get one more round for the sake of those that are not."""
_AFTERMATH_S = 0.3
"""How long a first failure waits for the death that may have caused it."""


@dataclass
class Member:
    """One role as its supervisor sees it."""

    name: str
    report: Report
    """The newest one."""
    done: bool = False


def starting(name: str, kind: str, index: int) -> Member:
    """Return a member of which nothing has been heard yet."""
    return Member(name, Report(kind, index, "starting", {}, 0.0, {}))


class SupervisedPlacement(ABC):
    """A placement whose roles run in workers; a subclass says how to reach them."""

    name: str

    def __init__(self, graph: Graph) -> None:
        self.crew = [starting(node.name, node.kind, node.index) for node in graph.nodes]
        self._running = False
        self._closed = False

    @abstractmethod
    def _tell(self, member: Member, command: Command, argument: str) -> None:
        """Send a command; a dead worker is no error here."""

    @abstractmethod
    def _listen(self, seconds: float) -> list[tuple[Member, Answer | Report]]:
        """Return what came from the workers, waiting at most so long for the first."""

    @abstractmethod
    def _save_own_ends(self, directory: Path) -> None:
        """Write the state of the ends that the caller holds."""

    @abstractmethod
    def _restore_own_ends(self, directory: Path) -> None:
        """Continue from it."""

    @abstractmethod
    def _end(self) -> None:
        """End all workers and give everything back; called once."""

    @property
    def done(self) -> bool:
        """Whether every role has finished."""
        return all(member.done for member in self.crew)

    def advance(self) -> None:
        """Hear from the roles for at most a tenth of a second; raises the one error that names a failed role."""
        if not self._running:
            self._running = True
            self._tell_all("run")
        self._hear(_LISTEN_S)

    def reports(self) -> list[Report]:
        """Return the newest report of every role."""
        return [member.report for member in self.crew]

    def pause(self) -> None:
        """Stop all roles between two steps; the next `advance` lets them go on."""
        if self._running:
            self._pause()
            self._running = False

    def save(self, directory: Path) -> None:
        """Write the states of all roles, paused, and what is on its way between them."""
        self.pause()
        self._ask("save", directory)
        self._save_own_ends(directory)

    def restore(self, directory: Path) -> None:
        """Continue from what `save` wrote for the same graph; streams are closed anew by their senders."""
        self._ask("restore", directory)
        self._restore_own_ends(directory)

    def close(self) -> None:
        """End every role and give everything back; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._end()

    def _tell_all(self, command: Command, argument: str = "") -> None:
        for member in self.crew:
            self._tell(member, command, argument)

    def _ask(self, command: Command, directory: Path) -> None:
        self._tell_all(command, str(directory.resolve()))
        self._await(command)

    def _await(self, what: str) -> None:
        """Wait until every role has answered so."""
        missing = {member.name for member in self.crew}
        while missing:
            missing -= {member.name for member, answer in self._hear(_LISTEN_S) if answer.what == what}

    def _pause(self) -> None:
        """Bring every role to a stop between two steps.

        A role inside a collective cannot stop before its peers have taken their part, and these may need a batch
        from a role that is paused already. So whenever it stays quiet, all that are paused get one more round.
        """
        unanswered = {member.name: 1 for member in self.crew}
        self._tell_all("pause")
        while any(unanswered.values()):
            heard = [member.name for member, answer in self._hear(_NUDGE_S) if answer.what == "pause"]
            for name in heard:
                unanswered[name] -= 1
            if not heard and any(unanswered.values()):
                for member in self.crew:
                    if not unanswered[member.name]:
                        unanswered[member.name] = 1
                        self._tell(member, "pause", "")

    def _hear(self, seconds: float) -> list[tuple[Member, Answer]]:
        """Return the answers that came; note reports and ends of roles, and raise if a role failed."""
        if self._closed:
            raise RuntimeError("the placement is closed")
        answers = []
        for member, heard in self._listen(seconds):
            if isinstance(heard, Report):
                member.report = heard
                continue
            answers.append((member, heard))
            member.done = member.done or heard.what == "done"
        failures = [(member, answer) for member, answer in answers if answer.what in ("failed", "died")]
        if failures:
            self._fail(failures)
        return answers

    def _fail(self, failures: list[tuple[Member, Answer]]) -> NoReturn:
        """End the run with one error; a death that comes with errors of others is their cause."""
        until = time.monotonic() + _AFTERMATH_S
        while (left := until - time.monotonic()) > 0:
            later = [(member, answer) for member, answer in self._listen(left) if isinstance(answer, Answer)]
            failures += [(member, answer) for member, answer in later if answer.what in ("failed", "died")]
        died = [(member, answer) for member, answer in failures if answer.what == "died"]
        member, answer = (died or failures)[0]
        self.close()
        error: ConfigError | RoleFailure
        if answer.exit_code == ConfigError.exit_code:
            error = ConfigError(f"{member.name}: {answer.cause}")
        else:
            error = RoleFailure(member.report.kind, member.report.index, answer.cause)
        if answer.trace:
            error.add_note(answer.trace)
        raise error
