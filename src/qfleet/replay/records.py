"""What a transition is besides its observations: one record a row, so that reading one costs one cache line."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qfleet.core.types import Floats, Ints, Priorities
from qfleet.replay.segments import Chains
from qfleet.replay.sumtree import Doubles, SumTree, use_numba

ACTION, BOOTSTRAP, REWARD, DISCOUNT, WORDS = range(5)
"""The 32-bit words of a record; the row numbers of bootstraps limit a shard to 2^31 rows."""

Words = NDArray[np.int32]


class Records:
    """The records of all rows, and the check of a write-back against the rows' generations."""

    def __init__(self, words: Words, chains: Chains) -> None:
        """Read and write records in `words` [capacity, WORDS], rewards and discounts as the bits of float32."""
        self.words, self.chains = words, chains
        self.floats: Floats = words.view(np.float32)

    def write_action(self, rows: Ints, action: Ints) -> None:
        """Store the actions [E] taken at `rows` [E]."""
        self.words[:, ACTION][rows] = action  # several times faster than [rows, ACTION]

    def write_window(self, rows: Ints, bootstrap: Ints, reward: Doubles, discount: Doubles) -> None:
        """Store what the windows [M] that begin at `rows` [M] came to."""
        self.words[:, BOOTSTRAP][rows] = bootstrap
        self.floats[:, REWARD][rows], self.floats[:, DISCOUNT][rows] = reward, discount

    def read(self, rows: Ints) -> tuple[Ints, Floats]:
        """Return whole numbers [4, B] (action, generation, row, bootstrap row) and [2, B] rewards and discounts."""
        words = self.words.take(rows, axis=0)
        whole, real = np.empty((4, len(rows)), np.int64), np.empty((2, len(rows)), np.float32)
        whole[0], whole[1] = words[:, ACTION], self.chains.generation.take(rows // self.chains.rows)
        whole[2], whole[3] = rows, words[:, BOOTSTRAP]
        real[:] = words.view(np.float32)[:, REWARD:].T
        return whole, real

    def draw(self, tree: SumTree, uniform: Doubles) -> tuple[Ints, Floats, Doubles]:
        """Return what `read` returns of the rows that `tree.draw` returns for `uniform` [B], and its second result."""
        rows, relative = tree.draw(uniform)
        return *self.read(rows), relative

    def highest(self, priorities: Priorities) -> float:
        """Return the highest priority, 0 at least; NaN if any is not finite or belongs to a row that was reused."""
        highest = float(np.maximum.reduce(priorities.priority, initial=0.0))  # the method `max` costs more
        current = self.chains.current(priorities.index, priorities.generation)
        return highest if math.isfinite(highest) and np.logical_and.reduce(current) else math.nan


def make_records(words: Words, chains: Chains, prioritised: bool) -> Records:
    """Return compiled records for a prioritised replay where numba is installed, else those of NumPy.

    To load numba takes a second, and records alone would gain only a few microseconds of each uniform batch.
    """
    if prioritised and use_numba():
        from qfleet.replay.compiled import CompiledRecords

        return CompiledRecords(words, chains)
    return Records(words, chains)
