"""The only loop: steps roles, and waits on the handles that idle ones named.

Inline, one host steps every role of the run in a fixed order; elsewhere each role has a host of its own. In lock-step
these only step when the supervisor's host says so, in the same fixed order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from qfleet.core.errors import Deadlock, QfleetError, RoleFailure
from qfleet.core.failpoints import failpoint
from qfleet.core.protocols import Report
from qfleet.core.role import Done, Idle, Role, Status, Worked
from qfleet.runtime.graph import End, Node, ends, open_handles

Wait = Callable[[Sequence[Any], float | None], None]
"""Waits until one of the waitables changes or the seconds have passed; given by the placement."""


class Stepped(Protocol):
    """A role as a host sees it: here, or elsewhere and stepped by message."""

    node: Node
    status: Status
    """What its last step returned."""

    def step(self) -> None:
        """Step the role once."""

    def waited(self, seconds: float) -> None:
        """Account for time in which this role was idle."""


S = TypeVar("S", bound=Stepped)


@dataclass
class Hosted:
    """A role under a host, with what is known of how it spends its time."""

    node: Node
    role: Role
    status: Status = field(default_factory=Worked)
    busy_s: float = 0.0
    idle_s: dict[str, float] = field(default_factory=dict)
    """Seconds idle, by reason."""
    stepping_since: float | None = None
    """When the present step began, by `time.monotonic`, for those who watch from another thread."""

    def step(self) -> None:
        """Step the role once; any failure becomes one error that names the role."""
        began = time.perf_counter()
        self.stepping_since = time.monotonic()
        try:
            failpoint("worker.step")
            self.status = self.role.step()
        except QfleetError:
            raise
        except Exception as error:
            raise RoleFailure(self.node.kind, self.node.index, f"{type(error).__name__}: {error}") from error
        self.stepping_since = None
        self.busy_s += time.perf_counter() - began

    def report(self) -> Report:
        """Return what a monitor shows of this role."""
        idle = self.status.reason if isinstance(self.status, Idle) else ""
        return Report(
            self.node.kind,
            self.node.index,
            self.role.phase,
            dict(self.role.metrics()),
            self.busy_s,
            dict(self.idle_s),
            idle,
        )

    def waited(self, seconds: float) -> None:
        """Account for time in which this role was idle."""
        if isinstance(self.status, Idle):
            self.idle_s[self.status.reason] = self.idle_s.get(self.status.reason, 0.0) + seconds


def build(node: Node, open_end: Callable[[End], Any]) -> Hosted:
    """Build a node's role with its live handles; any failure becomes one error that names the role."""
    try:
        return Hosted(node, node.build(node.config, open_handles(node.handles, open_end)))
    except QfleetError:
        raise
    except Exception as error:
        cause = f"could not be built: {type(error).__name__}: {error}"
        raise RoleFailure(node.kind, node.index, cause) from error


class Host(Generic[S]):
    """Steps its roles in a fixed order, round after round.

    Without a `wait` nothing outside this host can wake a role: idle roles without a deadline are then a deadlock.
    `acknowledge` is called when a step has returned: what it received is then used up.
    """

    def __init__(
        self,
        hosted: Sequence[S],
        wait: Wait | None = None,
        acknowledge: Callable[[], None] | None = None,
    ) -> None:
        self.hosted = list(hosted)
        self._acknowledge = acknowledge
        self._relays = [h for h in self.hosted if _receives(h.node)]
        self._sources = [h for h in self.hosted if not _receives(h.node)]
        self._wait = wait

    @property
    def done(self) -> bool:
        """Whether no role has anything left to do."""
        return all(isinstance(h.status, Done) for h in self.hosted)

    def round(self, longest_wait: float = 1.0) -> None:
        """Step every role that receives from a stream; only when none of them could work, step the sources.

        So within one host nothing new is produced before all that was produced is used up: act, store, learn, act.
        If no role could work, wait for what they named.
        """
        if not (self._step(self._relays) or self._step(self._sources)) and not self.done:
            self._rest(longest_wait)

    def _step(self, roles: Sequence[S]) -> bool:
        worked = False
        for hosted in roles:
            if not isinstance(hosted.status, Done):
                hosted.step()
                if self._acknowledge is not None:
                    self._acknowledge()
                worked = worked or not isinstance(hosted.status, Idle)
        return worked

    def _rest(self, longest_wait: float) -> None:
        idle = [(h, h.status) for h in self.hosted if isinstance(h.status, Idle)]
        waitables = [handle.waitable() for _, status in idle for handle in status.wake_on]
        waitables = [w for w in waitables if w is not None]
        deadlines = [status.deadline for _, status in idle if status.deadline is not None]
        if self._wait is None and not deadlines:
            waits = "; ".join(f"{h.node.name} waits: {status.reason}" for h, status in idle)
            raise Deadlock(f"no role can go on. {waits}")
        seconds = min([longest_wait, *deadlines])
        began = time.perf_counter()
        if self._wait is not None:
            self._wait(waitables, seconds)
        else:
            time.sleep(seconds)
        for hosted, _ in idle:
            hosted.waited(time.perf_counter() - began)


def _receives(node: Node) -> bool:
    return any(end.side == "receiver" and not end.asking for end in ends(node.handles))
