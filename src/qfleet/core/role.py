"""The role contract: what a role returns from `step`, and the methods that every host relies on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from qfleet.core.protocols import Waitable

State = dict[str, Any]
"""A tree of dicts, lists, numbers, strings, bytes, None, NumPy arrays and torch tensors; see `core.codec`."""


@dataclass(frozen=True)
class Worked:
    """The step did something; call again soon."""


@dataclass(frozen=True)
class Idle:
    """The step could do nothing; `reason` is what a person reads to find the bottleneck."""

    reason: str
    wake_on: tuple[Waitable, ...] = ()
    """Handles whose change ends the wait: all that could change the step's mind, and it has looked at each of them."""
    deadline: float | None = None
    """Seconds after which to step again in any case; None waits for `wake_on` alone."""


@dataclass(frozen=True)
class Done:
    """The role has nothing left to do in this run."""


Status = Worked | Idle | Done
WORKED, DONE = Worked(), Done()


class Role(ABC):
    """One responsibility of a run. Subclasses are built as `Role(config, handles)` and from nothing else."""

    kind: ClassVar[str]
    """The role's name in graphs, events and errors, such as "actor"."""

    phase: str = "running"
    """What the role is doing now, read by the heartbeat thread; set it around anything that blocks for long."""

    @abstractmethod
    def step(self) -> Status:
        """Do one bounded unit of work; wait for no other role."""

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers worth watching, by name, since the start of the run."""
        return {}

    def helpers_cpu_s(self) -> float:
        """Return the processor time so far of processes that this role has begun, in seconds; it never falls."""
        return 0.0

    @abstractmethod
    def state_dict(self) -> State:
        """Return everything that the future of this role depends on."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned."""

    def close(self) -> None:  # noqa: B027  (most roles hold nothing that needs closing)
        """Give back what the role holds: environments, files."""
