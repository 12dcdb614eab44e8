"""Running reward normalisation: the standard deviation of the discounted return, over all streams as stored."""

from __future__ import annotations

import math

import numpy as np

from qfleet.core.role import State
from qfleet.core.types import Bools, Ints
from qfleet.replay.segments import grown
from qfleet.replay.sumtree import Doubles


class RewardScale:
    """Follows each stream's discounted return and the variance of all of them (Chan's parallel update)."""

    def __init__(self, streams: int, gamma: float) -> None:
        self.gamma = gamma
        self.returns = np.zeros(streams, np.float64)
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def grow(self, streams: int) -> None:
        """Make room for streams below `streams`."""
        self.returns = grown(self.returns, streams, 0)

    def cut(self, streams: Ints) -> None:
        """Begin the returns of `streams` anew."""
        self.returns[streams] = 0.0

    def observe(self, streams: Ints, reward: Doubles, ended: Bools) -> None:
        """Take in one transition [E] of each of `streams` [E]; `ended` says after which the return begins anew."""
        if not len(streams):
            return
        returns = self.returns[streams] * self.gamma + reward
        count, mean = len(returns), float(returns.mean())
        total, shift = self.count + count, mean - self.mean
        self.squares += float(((returns - mean) ** 2).sum()) + shift * shift * self.count * count / total
        self.mean += shift * count / total
        self.count = total
        self.returns[streams] = np.where(ended, 0.0, returns)

    @property
    def scale(self) -> float:
        """What to divide rewards by; 1 while the returns have not varied."""
        variance = self.squares / self.count if self.count > 1 else 0.0
        return math.sqrt(variance) if variance > 1e-12 else 1.0

    def state_dict(self) -> State:
        """Return the statistics and the open returns."""
        return {**self.ledger(), "returns": self.returns.copy()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`."""
        self.returns = np.array(state["returns"])
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])

    def ledger(self) -> State:
        """Return what `state_dict` does, without a copy."""
        return {"returns": self.returns, "count": self.count, "mean": self.mean, "squares": self.squares}
