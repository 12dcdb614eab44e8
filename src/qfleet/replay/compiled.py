"""The replay's loops compiled by numba, for prioritised replays where it is installed; compiled once, then cached.

All are in this one file, because the cache of compiled code notices a change of its own file alone. Each pass over a
batch first touches all the memory that it will need, without waiting for any of it: the processor then fetches many
places at once, and a large tree costs little more than a small one.
"""

from __future__ import annotations

import numpy as np

from qfleet.core.compiling import cached
from qfleet.core.types import Bools, Floats, Ints, Priorities
from qfleet.replay.records import ACTION, BOOTSTRAP, DISCOUNT, REWARD, Records, Words
from qfleet.replay.segments import Chains
from qfleet.replay.sumtree import Doubles, SumTree

BITS = 4
ARITY = 1 << BITS
LINE = 8
"""Doubles in a cache line."""


@cached(error_model="numpy")
def _sum(v: Doubles) -> float:
    """Return the sum of ARITY values, added in the order of NumPy's `sum`: eight sums side by side, then in pairs."""
    left = ((v[0] + v[8]) + (v[1] + v[9])) + ((v[2] + v[10]) + (v[3] + v[11]))
    right = ((v[4] + v[12]) + (v[5] + v[13])) + ((v[6] + v[14]) + (v[7] + v[15]))
    total: float = left + right
    return total


@cached(error_model="numpy")
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


@cached(error_model="numpy")
def _descend(sums: Doubles, offsets: Ints, node: Ints, rest: Doubles) -> float:
    """Replace the top nodes [B] by the leaves that hold the masses `rest` [B] (changed); the result has no meaning."""
    prefix, touched = np.zeros(ARITY + 1), 0.0
    for level in range(len(offsets) - 2, 0, -1):
        children = offsets[level - 1]
        for i in range(len(node)):
            first = children + (node[i] << BITS)
            touched += sums[first] + sums[first + LINE]
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


@cached(error_model="numpy")
def _draw_leaves(sums: Doubles, offsets: Ints, running: Doubles, minimum: float, rest: Doubles, node: Ints) -> None:
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


@cached(error_model="numpy")
def _read(words: Words, floats: Floats, generation: Ints, rows: Ints, size: int, whole: Ints, real: Floats) -> int:
    """Read the records of `rows` [B] into `whole` [4, B] and `real` [2, B]; the result has no meaning."""
    touched = 0
    for i in range(len(rows)):
        touched += words[rows[i], ACTION]
    for i in range(len(rows)):
        row = rows[i]
        whole[0, i], whole[1, i] = words[row, ACTION], generation[row // size]
        whole[2, i], whole[3, i] = row, words[row, BOOTSTRAP]
        real[0, i], real[1, i] = floats[row, REWARD], floats[row, DISCOUNT]
    return touched


@cached(error_model="numpy")
def _draw(
    sums: Doubles, offsets: Ints, running: Doubles, minimum: float, rest: Doubles,
    words: Words, floats: Floats, generation: Ints, size: int, whole: Ints, real: Floats,
) -> int:  # fmt: skip
    """Draw as `_draw_leaves` does and read the records of what was drawn; the result has no meaning."""
    rows = whole[2]
    _draw_leaves(sums, offsets, running, minimum, rest, rows)
    return _read(words, floats, generation, rows, size, whole, real)


@cached(error_model="numpy")
def _highest(generation: Ints, size: int, index: Ints, stamp: Ints, priority: Floats) -> float:
    highest, fine = 0.0, True
    for i in range(len(index)):
        highest = max(highest, priority[i])
        fine &= (generation[index[i] // size] == stamp[i]) & np.isfinite(priority[i])
    return highest if fine else np.nan


class CompiledSumTree(SumTree):
    """A `SumTree` with the same results, several times faster."""

    bits = BITS

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

    def parts(self) -> tuple[Doubles, Ints, Doubles, float]:
        """Return what `_draw_leaves` needs; it brings the running sum up to date."""
        self._stale = False
        return self.sums, self.offsets, self._running, self.minimum

    def draw(self, uniform: Doubles) -> tuple[Ints, Doubles]:
        """Return one index [B] from each of B equal parts of the total, and the minimum over its value [B]."""
        index = np.empty(len(uniform), np.int64)
        _draw_leaves(*self.parts(), uniform, index)
        return index, uniform


class CompiledRecords(Records):
    """`Records` with the same results, faster."""

    def __init__(self, words: Words, chains: Chains) -> None:
        """Read and write records in `words` [capacity, WORDS]; what is compiled is loaded here, not while training."""
        super().__init__(words, chains)
        row = np.zeros(1, np.int64)
        self.read(row)
        tree = CompiledSumTree(1)
        tree.set(row, np.ones(1))
        self.draw(tree, np.zeros(1))
        self.highest(Priorities(row, row, np.zeros(1, np.float32)))

    def read(self, rows: Ints) -> tuple[Ints, Floats]:
        """Return whole numbers [4, B] (action, generation, row, bootstrap row) and [2, B] rewards and discounts."""
        whole, real = np.empty((4, len(rows)), np.int64), np.empty((2, len(rows)), np.float32)
        _read(self.words, self.floats, self.chains.generation, rows, self.chains.rows, whole, real)
        return whole, real

    def draw(self, tree: SumTree, uniform: Doubles) -> tuple[Ints, Floats, Doubles]:
        """Return what `read` returns of the rows that `tree.draw` returns for `uniform` [B], and its second result.

        In one call: to pass an array to compiled code costs as much as the work on a few rows.
        """
        whole, real = np.empty((4, len(uniform)), np.int64), np.empty((2, len(uniform)), np.float32)
        assert isinstance(tree, CompiledSumTree)
        sums, offsets, running, minimum = tree.parts()
        rows, generation = self.chains.rows, self.chains.generation
        _draw(sums, offsets, running, minimum, uniform, self.words, self.floats, generation, rows, whole, real)
        return whole, real, uniform

    def highest(self, priorities: Priorities) -> float:
        """Return the highest priority, 0 at least; NaN if any is not finite or belongs to a row that was reused."""
        index, stamp, priority = priorities.index, priorities.generation, priorities.priority
        return float(_highest(self.chains.generation, self.chains.rows, index, stamp, priority))
