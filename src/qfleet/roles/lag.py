"""How far the weights that acted were behind those that learn: in the whole run, and of late."""

from __future__ import annotations

from collections.abc import Sequence

from qfleet.core.metrics import Window

RECENT = 100
"""Of so many batches the lag that is shown is: of their number, not of a time, so that every placement has the same."""


class PolicyLag:
    """Lags of the batches that were learned from, in batches."""

    def __init__(self) -> None:
        self.total = 0
        """The sum over the whole run."""
        self._recent = Window(RECENT)

    def add(self, lag: int, batches: int = 1) -> None:
        """Note the lag of some batches."""
        self.total += batches * lag
        for _ in range(min(batches, RECENT)):
            self._recent.add(lag)

    def metrics(self, batches: int) -> dict[str, float]:
        """Return the mean of late, and that over all `batches`, which is the only one before the first of this life."""
        mean = self.total / max(batches, 1)
        return {"policy_lag": self._recent.mean() if len(self._recent) else mean, "policy_lag_mean": mean}

    def recent(self) -> list[float]:
        """Return the lags of late, to be saved."""
        return list(self._recent.state_dict()["values"])

    def load(self, total: int, recent: Sequence[float]) -> None:
        """Continue; older checkpoints know none of late."""
        self.total = total
        self._recent.load_state_dict({"values": recent})
