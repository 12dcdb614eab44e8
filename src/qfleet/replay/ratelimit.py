"""The samples-per-insert limiter: holds the learner to its share of the experience, the actors to its pace."""

from __future__ import annotations

from qfleet.core.protocols import Counter
from qfleet.core.role import State


class RateLimiter:
    """One update for every `train_period` transitions inserted after the first `learning_starts`.

    Updates are drawn `together` in so many at once. Sampling waits while they are not all due; inserting waits while
    more than `tolerance` times as many are due. At any time one of the two is allowed, so nothing can wait for ever.
    """

    def __init__(
        self,
        train_period: float,
        learning_starts: int,
        inserts: Counter,
        updates: Counter,
        tolerance: float = 1.0,
        together: int = 1,
    ) -> None:
        """Watch two run-wide counters: transitions inserted, and updates.

        `tolerance` is how many draws may be due before inserting stops: at least 1, or both sides could stop.
        """
        if train_period <= 0 or tolerance < 1:
            raise ValueError(f"train_period ({train_period}) must be > 0 and tolerance ({tolerance}) at least 1")
        self.train_period, self.learning_starts = train_period, learning_starts
        self.inserts, self.updates, self.tolerance = inserts, updates, tolerance
        self._draw_period = together * train_period
        self.forgiven = 0.0
        """Transitions that were inserted (or, if negative, are missing) without counting."""
        self._owed_at_save = 0.0

    def may_sample(self) -> bool:
        """Return whether the updates of one more draw are due."""
        return self.inserts.total() >= self.learning_starts and self._owed() >= self._draw_period

    def may_insert(self) -> bool:
        """Return whether the updates of no more than `tolerance` draws are due."""
        return self.inserts.total() < self.learning_starts or self._owed() <= self.tolerance * self._draw_period

    def forgive(self) -> None:
        """After a restore: where the counters moved from what was saved by more than the tolerance, count from here.

        The debt is never paid in one burst, nor does a learner that is ahead wait until it is level. Within the
        tolerance nothing changes, so that an exact resume stays exact.
        """
        moved = self._owed() - self._owed_at_save
        if abs(moved) > self.tolerance * self._draw_period:
            self.forgiven += moved

    def _owed(self) -> float:
        """Transitions inserted that no update has answered yet."""
        counted = max(self.inserts.total() - self.learning_starts, 0)
        return counted - self.forgiven - self.updates.total() * self.train_period

    def state_dict(self) -> State:
        """Return what was forgiven and what is owed; the counters are saved by their owners."""
        return {"forgiven": self.forgiven, "owed": self._owed()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`; call `forgive` when the counters are restored too."""
        self.forgiven, self._owed_at_save = float(state["forgiven"]), float(state["owed"])
