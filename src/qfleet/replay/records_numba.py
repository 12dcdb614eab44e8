"""The loops over records compiled by numba; imported by `make_records` alone, compiled once, then cached."""

from __future__ import annotations

import numba
import numpy as np

from qfleet.core.types import Floats, Ints, Priorities
from qfleet.replay.records import ACTION, BOOTSTRAP, DISCOUNT, REWARD, Records, Words
from qfleet.replay.segments import Chains


@numba.njit(cache=True)
def _read(words: Words, floats: Floats, generation: Ints, rows: Ints, size: int, whole: Ints, real: Floats) -> None:
    for i in range(len(rows)):
        row = rows[i]
        whole[0, i], whole[1, i] = words[row, ACTION], generation[row // size]
        whole[2, i], whole[3, i] = row, words[row, BOOTSTRAP]
        real[0, i], real[1, i] = floats[row, REWARD], floats[row, DISCOUNT]


@numba.njit(cache=True)
def _highest(generation: Ints, size: int, index: Ints, stamp: Ints, priority: Floats) -> float:
    highest, fine = 0.0, True
    for i in range(len(index)):
        highest = max(highest, priority[i])
        fine &= (generation[index[i] // size] == stamp[i]) & np.isfinite(priority[i])
    return highest if fine else np.nan


class CompiledRecords(Records):
    """`Records` with the same results, faster."""

    def __init__(self, words: Words, chains: Chains) -> None:
        """Read and write records in `words` [capacity, WORDS]; what is compiled is loaded here, not while training."""
        super().__init__(words, chains)
        row = np.zeros(1, np.int64)
        self.read(row)
        self.highest(Priorities(row, row, np.zeros(1, np.float32)))

    def read(self, rows: Ints) -> tuple[Ints, Floats]:
        """Return whole numbers [4, B] (action, generation, row, bootstrap row) and [2, B] rewards and discounts."""
        whole, real = np.empty((4, len(rows)), np.int64), np.empty((2, len(rows)), np.float32)
        _read(self.words, self.floats, self.chains.generation, rows, self.chains.rows, whole, real)
        return whole, real

    def highest(self, priorities: Priorities) -> float:
        """Return the highest priority, 0 at least; NaN if any is not finite or belongs to a row that was reused."""
        index, stamp, priority = priorities.index, priorities.generation, priorities.priority
        return float(_highest(self.chains.generation, self.chains.rows, index, stamp, priority))
