"""A process or actor of its own for one role, or for several of a kind that take turns in it.

Steps them, and between steps obeys the supervisor's commands."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qfleet.core.errors import CheckpointError
from qfleet.core.protocols import Report
from qfleet.core.role import Idle
from qfleet.runtime import checkpoint, edgestates
from qfleet.runtime.answers import Answer, Command, failed
from qfleet.runtime.captured import Captured
from qfleet.runtime.graph import End, Node
from qfleet.runtime.host import Host, Hosted, Wait, build
from qfleet.runtime.writing import PartWriting

_LONGEST_WAIT_S = 1.0
_REPORT_S = 0.2
"""How old the metrics of a working role may get."""
_WRITING_ENDS_S = 3.0
"""How long a part of a checkpoint that is not wanted any more may take to end."""
_BACKGROUND = 10
"""How nice processes in the background are to the others."""


class OpenEnds:
    """The ends that one role, or the caller, has opened: each end keeps its own part of an edge's state."""

    def __init__(self, open_end: Callable[[End], Any]) -> None:
        self._open_end = open_end
        self._opened: dict[str, Any] = {}
        self._optional: set[str] = set()
        self._receivers: list[Any] = []
        self._edges: dict[int, str] = {}
        """The edge of each handle, by the handle's `id`."""

    def open(self, end: End) -> Any:
        """Return the live handle of an end; the same one each time, but for keeps: no part of a checkpoint."""
        if end.side in ("keep", "kept"):
            return self._open_end(end)
        key = edgestates.end_key(end.edge, end.side, end.reader)
        if key not in self._opened:
            self._opened[key] = self._open_end(end)
            self._edges[id(self._opened[key])] = end.edge
            if end.optional:
                self._optional.add(key)
            if end.side == "receiver":
                self._receivers.append(self._opened[key])
        return self._opened[key]

    def edges(self, handles: Sequence[Any]) -> tuple[str, ...]:
        """Return the edges that handles are ends of."""
        return tuple(self._edges[id(handle)] for handle in handles if id(handle) in self._edges)

    def acknowledge(self) -> None:
        """Say that everything received so far is used up."""
        for receiver in self._receivers:
            receiver.acknowledge()

    def drain(self) -> None:
        """Receive all that has come, for nobody."""
        for receiver in self._receivers:
            while receiver.receive() is not None:
                pass
        self.acknowledge()

    def capture(self, directory: Path, owner: str) -> Captured:
        """Take the state of all ends; everything is paused, so that both ends of an edge agree."""
        own = f"{owner}{edgestates.OWN}"
        return Captured(directory, own, {key: end.state() for key, end in self._opened.items()})

    def restore(self, directory: Path, owner: str) -> None:
        """Continue from what `capture` took, or from what another placement wrote."""
        saved = edgestates.of_owner(directory, owner, list(self._opened))
        for key, end in self._opened.items():
            if key not in saved:
                if key in self._optional:
                    continue
                raise CheckpointError(f"{directory} knows no edge '{key}': it was made by a differently arranged run")
            end.load(saved[key])


class Worker:
    """Runs one role, or several. `run` is called by one thread; `command` and `reports` may be called by another one.

    What is commanded is done by all of them, what is answered is said once for all.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        open_end: Callable[[End], Any],
        wait: Wait,
        answer: Callable[[Answer | Report], None],
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._ends = {name: OpenEnds(open_end) for name in self._nodes}
        self._wait = wait
        self._answer = answer
        self._commands: deque[tuple[Command, str]] = deque()
        self._reports = [Report(node.kind, node.index, "starting", {}, 0.0, {}) for node in nodes]
        self._report_due = 0.0
        self._helpers_s = 0.0
        """Processor time of what the roles have begun."""
        self._host: Host[Hosted] | None = None
        self._phase = ("starting", time.monotonic())
        """The phase that was reported last, and when it was first seen."""
        self._engaged: tuple[str, float] | None = self._phase
        """What the worker does besides stepping, and since when."""
        self._running = False
        self._told_done = False
        self._writing: PartWriting | None = None
        """What was captured for the last checkpoint."""

    def command(self, name: Command, argument: str) -> None:
        """Queue a command; the caller must then wake `wait`."""
        self._commands.append((name, argument))

    def reports(self) -> list[Report]:
        """Return each role's newest report, with the phase that the worker is in at this moment, even if blocked."""
        phase, since = self._occupation()
        if phase != self._phase[0]:
            self._phase = (phase, time.monotonic())
        # What a former phase of the same step took must not be held against this one.
        step_s = time.monotonic() - max(since, self._phase[1])
        own, *guests = [replace(report, phase=phase, step_s=step_s) for report in self._reports]
        cpu_s = time.process_time() + self._helpers_s
        return [replace(own, cpu_s=cpu_s), *(replace(guest, host=own.index) for guest in guests)]

    def _occupation(self) -> tuple[str, float]:
        """Return the phase, and since when the worker is in one piece of work; now if it waits."""
        engaged, host = self._engaged, self._host
        if engaged is not None or host is None:
            return engaged or ("starting", time.monotonic())
        steps = [(since, one.role.phase) for one in host.hosted if (since := one.stepping_since) is not None]
        since, phase = steps[0] if steps else (time.monotonic(), host.hosted[0].role.phase)
        return phase, since

    def run(self) -> None:
        """Build the roles and step them until told to stop; a failure is answered, not raised."""
        hosted: list[Hosted] = []
        try:
            for name, node in self._nodes.items():
                hosted.append(build(node, self._ends[name].open))
            self._host = Host(hosted, self._wait, self._acknowledge)
            self._engaged = None
            self._answer(Answer("built"))
            while self._obey(self._host):
                self._round(self._host, _LONGEST_WAIT_S)
        except Exception as error:
            self._answer(failed(error))
        finally:
            if self._writing is not None:
                self._writing.end(_WRITING_ENDS_S)
            for one in hosted:
                one.role.close()

    def _acknowledge(self) -> None:
        for own in self._ends.values():
            own.acknowledge()

    def _obey(self, host: Host[Hosted]) -> bool:
        """Carry out what was commanded, and wait here unless the role is to run; returns whether to go on."""
        while self._commands or not self._running or host.done:
            if not self._commands:
                self._wait((), _LONGEST_WAIT_S)
                continue
            name, argument = self._commands.popleft()
            if name == "stop":
                return False
            if name in ("save", "restore", "part"):
                self._engaged = (name, time.monotonic())
            answer = self._carry_out(host, name, argument)
            self._engaged = None
            self._answer(answer)
            if name == "save" and not answer.cause and self._writing is not None:
                self._writing.start()  # only now: that it has ended must not be heard before that it has begun
        return True

    def _carry_out(self, host: Host[Hosted], name: Command, argument: str) -> Answer:
        first, directory = host.hosted[0], Path(argument)
        if name == "run":
            self._running = True
        elif name == "pause" and self._running:
            self._running = False
        elif name == "pause" and not host.done:
            # Another role cannot come to its pause without this one (a collective): give it one more round.
            self._round(host, 0.0)
        elif name == "step":
            self._round(host, 0.0)
            status = first.status
            return Answer(name, status=replace(status, wake_on=()) if isinstance(status, Idle) else status)
        elif name == "report":
            return Answer(name, report=first.report())
        elif name == "save":
            try:
                self._capture(host.hosted, directory)
            except (CheckpointError, OSError) as error:  # the supervisor knows whether the run can do without
                return Answer(name, str(error))
        elif name == "part":
            first.role.state_dict()  # which is kept for the next life
        elif name == "restore":
            for owner, own in self._ends.items():  # first: a role may look at its counters
                own.restore(directory, owner)
            for one in host.hosted:
                one.role.load_state_dict(checkpoint.read_state(directory, one.node.name))
        return Answer(name)

    def _capture(self, hosted: Sequence[Hosted], directory: Path) -> None:
        """Take the roles' states for a checkpoint; they are written beside the steps, and then that is answered."""
        if self._writing is not None:
            self._writing.end(_WRITING_ENDS_S)  # it has told how it ended, or was given up
        states = [Captured(directory, one.node.name, one.role.state_dict()) for one in hosted]
        states += [own.capture(directory, owner) for owner, own in self._ends.items()]
        self._writing = PartWriting(states, lambda cause: self._answer(Answer("written", cause)))

    def _round(self, host: Host[Hosted], longest_wait: float) -> None:
        host.round(longest_wait)
        now = time.monotonic()
        if now >= self._report_due or host.done:
            self._report_due = now + _REPORT_S
            self._reports = [self._report(one) for one in host.hosted]
            self._helpers_s = sum(one.role.helpers_cpu_s() for one in host.hosted)
        if host.done and not self._told_done:
            self._told_done = True
            for report in self.reports():
                self._answer(report)
            self._answer(Answer("done"))

    def _report(self, hosted: Hosted) -> Report:
        status = hosted.status
        awaited = self._ends[hosted.node.name].edges(status.wake_on) if isinstance(status, Idle) else ()
        return replace(hosted.report(), awaited=awaited)


def name_process(name: str) -> None:
    """Show this process by a name of its own (15 letters at most) to `top`, `ps -o comm` and the like, on Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def be_nice() -> None:
    """Leave a core to any other process that wants it: this one gets about a tenth of its weight."""
    os.nice(_BACKGROUND)


def note_last_words(path: Path) -> None:
    """Have a crash of this process write down where it was."""
    with contextlib.suppress(OSError):  # the run has ended meanwhile
        faulthandler.enable(path.open("w"), all_threads=False)


def set_threads(count: int) -> None:
    """Bound the thread pools of this process, of libraries it loads later, and of processes it starts."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[variable] = str(count)
    torch.set_num_threads(count)
