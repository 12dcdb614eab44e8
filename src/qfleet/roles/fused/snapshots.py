"""States of the loops of a group that outlive their processes: from the newest one that all ranks have, they go on."""

from __future__ import annotations

import time

from qfleet.core import codec
from qfleet.core.protocols import Keep
from qfleet.core.role import State
from qfleet.roles.fused.team import Team

_LIVES = 2**32
"""What one life adds to the numbers of its states, of which it makes fewer."""


class Snapshots:
    """The last two states of one rank, since a death may leave the ranks with different newest ones."""

    def __init__(self, keep: Keep, team: Team) -> None:
        """Begin without any but that of the beginning, which has the number 0 and need not be kept."""
        self._keep, self._team = keep, team
        self._number = keep.life * _LIVES
        self._kept: list[tuple[int, State | None]] = [(0, None), (0, None)]
        self._at = time.monotonic()

    def due(self, period_s: float) -> bool:
        """Return whether the first rank's newest state is older than that; all ranks ask."""
        return self._team.joining.agreed(time.monotonic() - self._at >= period_s)

    def commit(self, state: State) -> None:
        """Keep a state of which every rank keeps its part at the same point of the run."""
        self._number += 1
        self._kept = [self._kept[1], (self._number, codec.roundtrip(state))]  # what it is made of will change
        self._keep.commit(self._kept)
        self._at = time.monotonic()

    def restore(self) -> State | None:
        """Return the newest state that all ranks have of former lives; None for that of the beginning."""
        kept: dict[int, State | None] = dict(self._keep.committed() or self._kept)
        numbers = sorted(kept)
        common = self._team.common((numbers[0], numbers[-1]))
        self._kept = [(common, kept[common])] * 2
        return kept[common]
