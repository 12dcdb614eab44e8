"""The sum tree's loops compiled by numba; imported by `make_sum_tree` alone, compiled once, then cached.

Each pass over a batch first touches all the memory that it will need, without waiting for any of it: the processor
then fetches many places at once, and a large tree costs little more than a small one.
"""

from __future__ import annotations

import numba
import numpy as np

from qfleet.core.types import Bools, Ints
from qfleet.replay.sumtree import ARITY, BITS, Doubles, SumTree

LINE = 8
"""Doubles in a cache line, and running sums that NumPy's `sum` keeps side by side."""


@numba.njit(cache=True)
def _lane(values: Doubles, j: int) -> float:
    lane: float = ((values[j] + values[j + LINE]) + values[j + 2 * LINE]) + values[j + 3 * LINE]
    return lane


@numba.njit(cache=True)
def _sum(values: Doubles) -> float:
    """Return the sum of ARITY values, added in the order of NumPy's `sum`: eight sums side by side, then in pairs."""
    left = (_lane(values, 0) + _lane(values, 1)) + (_lane(values, 2) + _lane(values, 3))
    right = (_lane(values, 4) + _lane(values, 5)) + (_lane(values, 6) + _lane(values, 7))
    total: float = left + right
    return total


@numba.njit(cache=True)
def _set(sums: Doubles, offsets: Ints, changed: Bools, index: Ints, value: Doubles, minimum: float) -> float:
    """Write the values [B] and their nodes, note what `changed`; return the new minimum, NaN if it was overwritten."""
    held = minimum
    for i in range(len(index)):
        if sums[index[i]] == minimum:
            held = np.nan
    for i in range(len(index)):
        sums[index[i]] = value[i]
        changed[index[i] >> BITS] = True
    for i in range(len(index)):
        if 0.0 < sums[index[i]] < held:
            held = sums[index[i]]
    for level in range(1, len(offsets) - 1):
        done = -1
        for i in range(len(index)):
            node = index[i] >> (BITS * level)
            if node != done:  # neighbours share their parents
                first, done = offsets[level - 1] + (node << BITS), node
                sums[offsets[level] + node] = _sum(sums[first : first + ARITY])
    return held


@numba.njit(cache=True)
def _descend(sums: Doubles, offsets: Ints, node: Ints, rest: Doubles) -> float:
    """Replace the top nodes [B] by the leaves that hold the masses `rest` [B] (changed); the result has no meaning."""
    prefix, touched = np.zeros(ARITY + 1), 0.0
    for level in range(len(offsets) - 2, 0, -1):
        children = offsets[level - 1]
        for i in range(len(node)):
            first = children + (node[i] << BITS)
            touched += (sums[first] + sums[first + LINE]) + (sums[first + 2 * LINE] + sums[first + 3 * LINE])
        for i in range(len(node)):
            first, share, mass, child = children + (node[i] << BITS), 0.0, rest[i], 0
            family = sums[first : first + ARITY]
            for j in range(ARITY):
                share += family[j]
                prefix[j + 1] = share
            if mass >= share:  # what rounding left over must not fall off the node's end
                mass = np.nextafter(share, 0.0)
            for j in range(1, ARITY + 1):  # counts instead of stopping: a branch guessed wrong costs more than this
                child += prefix[j] <= mass
            rest[i], node[i] = mass - prefix[child], (node[i] << BITS) + child
    return touched


@numba.njit(cache=True)
def _draw(sums: Doubles, offsets: Ints, running: Doubles, minimum: float, rest: Doubles, node: Ints) -> None:
    """Turn the uniform numbers in `rest` [B] into leaves `node` [B] and the minimum over their values."""
    size, total = len(node), 0.0
    for i in range(len(running) - 1):
        total += sums[offsets[-2] + i]
        running[i + 1] = total
    part, last, top = total / size, np.nextafter(total, 0.0), 0
    for i in range(size):
        mass = min((i + rest[i]) * part, last)
        while running[top + 1] <= mass:  # the masses ascend
            top += 1
        node[i], rest[i] = top, mass - running[top]
    rest[0] = _descend(sums, offsets, node, rest)
    for i in range(size):
        rest[i] = minimum / sums[node[i]]


class CompiledSumTree(SumTree):
    """A `SumTree` with the same results, several times faster."""

    def __init__(self, capacity: int) -> None:
        """Make a tree of zeros for the indices below `capacity`; compiled code is loaded here, not while training."""
        super().__init__(capacity)
        index = np.zeros(1, np.int64)
        self.set(index, np.ones(1))
        self.draw(np.zeros(1))
        self.set(index, np.zeros(1))

    def set(self, index: Ints, value: Doubles) -> None:
        """Write `value` [B] at `index` [B]; where an index occurs twice, the last value stays."""
        self._stale = True
        self._minimum = _set(self.sums, self.offsets, self._changed, index, value, self._minimum)

    def draw(self, uniform: Doubles) -> tuple[Ints, Doubles]:
        """Return one index [B] from each of B equal parts of the total, and the minimum over its value [B]."""
        index = np.empty(len(uniform), np.int64)
        _draw(self.sums, self.offsets, self._running, self.minimum, uniform, index)
        self._stale = False
        return index, uniform
