"""Plays all ranks of a group in one process, so that learners that share an update can be looked into on a laptop.

Receives: what its ranks receive, which are those of other placements.
Sends: what they send.
Waits for: what they wait for; for each other they wait here, where they take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.parallel.turns import Turns
from qfleet.roles.fused import Fused
from qfleet.roles.learner import Learner


@dataclass(frozen=True)
class TwinHandles:
    """What each rank sees of the run."""

    ranks: tuple[Any, ...]


class Twin(Role):
    """A whole group as one role. After each of its steps no rank is in the middle of one of its own."""

    member: ClassVar[type[Role]]
    """What a rank is in placements where each has a process."""

    def __init__(self, setups: tuple[Any, ...], handles: TwinHandles) -> None:
        """Take what each rank is built from, its place in the group included."""
        turns, member = Turns(len(setups)), cast("Callable[[Any, Any], Role]", self.member)

        def build(rank: int) -> Role:
            setup = setups[rank]
            return member(replace(setup, group=replace(setup.group, turns=turns)), handles.ranks[rank])

        self._turns, self._ranks = turns, turns.together(build)

    def step(self) -> Status:
        """Let every rank make a step, those that others wait for as many as it takes to come to them."""
        statuses = self._turns.together(lambda rank: self._ranks[rank].step(), again=lambda status: status == WORKED)
        if WORKED in statuses:
            return WORKED
        return next((status for status in statuses if isinstance(status, Idle)), DONE)

    def metrics(self) -> Mapping[str, float]:
        """Return the first rank's numbers."""
        return self._ranks[0].metrics()

    def state_dict(self) -> State:
        """Return the state of every rank."""
        return {"ranks": self._turns.together(lambda rank: self._ranks[rank].state_dict())}

    def load_state_dict(self, state: State) -> None:
        """Continue."""
        self._turns.together(lambda rank: self._ranks[rank].load_state_dict(state["ranks"][rank]))

    def close(self) -> None:
        """Close every rank."""
        for rank in self._ranks:
            rank.close()


class LearnerTwin(Twin):
    """Several learners as one role."""

    kind = Learner.kind
    member = Learner


class FusedTwin(Twin):
    """Several fused loops as one role."""

    kind = Fused.kind
    member = Fused
