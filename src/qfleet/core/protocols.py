"""The handles through which roles see each other: bounded streams, latest values, and counters.

A role never knows whether the other end is in the same process, another process or another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from numpy.typing import NDArray

from qfleet.core.types import Notice

M = TypeVar("M")
In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)


@runtime_checkable
class Waitable(Protocol):
    """Something a host can wait on."""

    def waitable(self) -> Any:
        """Return the object the placement's wait understands (a connection, an event); None if always local."""


class Sender(Waitable, Protocol[In]):
    """The sending end of a bounded stream."""

    def ready(self) -> bool:
        """Return whether one more message fits."""

    def send(self, message: In) -> None:
        """Append one message and give its arrays up; only allowed while `ready()`."""

    def close(self) -> None:
        """Say that no further message will come."""

    def sent(self) -> int:
        """Return how many messages were sent here, by former lives of the role too; a restored run counts anew."""

    def deserted(self) -> bool:
        """Return whether whoever received here has left the run for good."""


class Receiver(Waitable, Protocol[Out]):
    """The receiving end of a bounded stream."""

    def receive(self) -> Out | None:
        """Return the next message, or None if there is none now."""

    def exhausted(self) -> bool:
        """Return whether the stream is closed by its sender and empty."""


class Publisher(Protocol[In]):
    """The writing end of a latest-value edge: one writer, the newest value wins."""

    def publish(self, message: In) -> None:
        """Replace the value."""


class Subscriber(Waitable, Protocol[Out]):
    """The reading end of a latest-value edge."""

    def latest(self) -> Out | None:
        """Return the newest value if it is newer than the one returned before, else None."""


class Counter(Protocol):
    """A writer's own cell of a run-wide counter; the run's value is the sum over all writers."""

    def add(self, amount: int) -> None:
        """Add to this writer's cell."""

    def own(self) -> int:
        """Return what this writer's cell holds."""

    def total(self) -> int:
        """Return the sum over all writers, as far as it is known here."""


class Keep(Protocol):
    """Memory of a role that outlives the role's process, where the placement can give such; see ADR 4."""

    life: int
    """How often the role was begun anew in this run: 0 the first time."""
    gone: int
    """How many of those who may live and die together with the role are not there."""
    planned: bool
    """Whether the former life was ended on purpose, after all that had come was used up."""
    meeting: str
    """Where the role's group meets, whose ranks are on several nodes; empty where they are on one."""

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return the array of that name: zeros in the first life, later what the former life left in it."""

    def commit(self, state: Any) -> None:
        """Replace the kept state (a tree as of `state_dict`) as a whole: a death leaves the old one or the new one."""

    def committed(self) -> Any | None:
        """Return what the last `commit` of any life kept; None if there was none."""


class KeptRows(Protocol):
    """The arrays of another role's keep, as far as the placement shares memory between the two."""

    def rows(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return the array [N, *shape] of that name, as it is now and will be; not to be written."""


LONG_STEP_S = 5.0
"""A step that takes longer is told of: until it ends its role seems to do nothing."""


@dataclass(frozen=True)
class Report:
    """What a host tells of one role: for the panel, the sinks and the balancer."""

    kind: str
    index: int
    phase: str
    metrics: dict[str, float]
    busy_s: float
    idle_s: dict[str, float]
    """Seconds idle since the start, by reason."""
    idle: str = ""
    """Why the role is idle now; empty when it works."""
    step_s: float = 0.0
    """Seconds that its present step has taken so far; 0 between two steps."""
    host: int | None = None
    """Which role of its kind's process it is in; None for its own."""
    cpu_s: float = 0.0
    """Processor time so far of its process, all threads included, and of those that it has begun; 0 for a role that
    shares another's."""
    queue: int | None = None
    """Messages on their way to it; None where nobody counts them, or it receives none."""
    awaited: tuple[str, ...] = ()
    """Edges of which any could end its waiting."""

    @property
    def waits_for(self) -> str:
        """What it waits for now: while a step takes long, what that waits for, and not what it said before."""
        if self.step_s < LONG_STEP_S:
            return self.idle
        return "" if self.phase == "running" else self.phase


@dataclass(frozen=True)
class Incident:
    """A death that the run survived."""

    role: str
    index: int
    cause: str
    life: int
    """How often the role was begun anew by now."""
    seconds_to_repair: float
    """From the death to the moment when its next life was ready, or died too."""


@dataclass(frozen=True)
class Machine:
    """Where roles of a run can be."""

    id: str
    name: str
    cores: float
    draining: str = ""
    """Why it will soon be gone; empty if it will not."""


class Writing(Protocol):
    """The states of a whole run at one moment, on their way to the disk."""

    def finish(self) -> None:
        """Write them, or wait until those who do have done so; CheckpointError if that is not possible.

        Called once, in another thread than the placement's, which meanwhile is advanced or attended to.
        """

    def abandon(self) -> None:
        """Have `finish` end soon, with an error."""


class Placement(Protocol):
    """A graph brought to life."""

    name: str

    def open(self, end: Any) -> Any:
        """Return the live handle of an edge's end that the caller, not a role, holds."""

    @property
    def done(self) -> bool:
        """Whether every role has finished."""

    def advance(self) -> None:
        """Let the run go on for a bounded time; raises the one error that names a failed role."""

    def reports(self) -> list[Report]:
        """Return the newest report of every role."""

    def incidents(self) -> list[Incident | Notice]:
        """Return what went wrong and did not end the run, since it was last asked."""

    def pause(self) -> None:
        """Stop all roles between two steps; the next `advance` lets them go on."""

    def attend(self, seconds: float) -> None:
        """Let that much time pass without letting the run go on; raises as `advance` does."""

    def save(self, directory: Path) -> Writing:
        """Take the states of all roles and edges, paused, for a directory; they are written while the run goes on."""

    def restore(self, directory: Path) -> None:
        """Continue from what was written there, before the first `advance`."""

    def close(self) -> None:
        """End every role and give everything back."""


@runtime_checkable
class Scalable(Protocol):
    """A placement whose roles can come and go."""

    def machines(self) -> list[Machine]:
        """Return where roles can be, the driver's machine first."""

    def home(self, name: str) -> str:
        """Return the id of the machine where a role is."""

    def present(self, kind: str) -> list[int]:
        """Return the indices of a kind's roles that are there and stay, in order."""

    def absent(self, kind: str) -> list[int]:
        """Return the indices of a kind's roles that could come now, in order."""

    def come(self, kind: str, indices: Sequence[int], machine: str) -> bool:
        """Begin roles that are away; returns False where their kind has come to its end."""

    def go(self, kind: str, indices: Sequence[int]) -> None:
        """Have roles close between two steps and be away from then on."""

    def share(self, kind: str, size: int) -> str:
        """Have the roles of a kind in so many processes; returns why that cannot be done now, empty if it was."""

    def regroup(self, kind: str, size: int, rest: str) -> str:
        """Let the first `size` roles of a kind be its group; returns why that cannot be done now, empty if it was.

        They first use up all that was sent to them, and then say that they wait for the reason `rest`.
        """
