"""A wide sum tree over the rows of a replay, with the minimum kept too, so that importance weights are exact.

The leaves are grouped by 32 until at most 1024 nodes are left; these tops are searched through their running sum.
An inner node is always recomputed from its children, in their order: the tree cannot drift from its leaves, and the
compiled variant in `sumtree_numba` agrees with this one to the last bit.
"""

from __future__ import annotations

import importlib.util
import os
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qfleet.core.types import Ints

BITS = 5
ARITY = 1 << BITS
MOST_TOPS = 1024

Doubles = NDArray[np.float64]


class SumTree:
    """Non-negative values by index; a value of 0 means that the index is not there."""

    def __init__(self, capacity: int) -> None:
        """Make a tree of zeros for the indices below `capacity`."""
        depth = 1
        while -(-capacity // ARITY**depth) > MOST_TOPS:
            depth += 1
        tops = -(-capacity // ARITY**depth)
        lengths = [tops * ARITY ** (depth - level) for level in range(depth + 1)]
        self.capacity = capacity
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.sums = np.zeros(self.offsets[-1], np.float64)
        self.mins = np.full(self.offsets[-1] - lengths[0], np.inf, np.float64)
        """The smallest positive leaf under each inner node; node i of `sums` is node i - `lengths[0]` here."""
        self.levels = [self.sums[a:b] for a, b in pairwise(self.offsets)]
        inner = self.offsets[1:] - lengths[0]
        self.min_levels = [self.mins[a:b] for a, b in pairwise(inner)]
        self._running = np.zeros(tops + 1, np.float64)
        self._minimum = np.inf
        self._stale = True

    def get(self, index: Ints) -> Doubles:
        """Return the values [B] at `index` [B]."""
        return self.sums.take(index)

    @property
    def leaves(self) -> Doubles:
        """All values [capacity] (a view; write through `set` only)."""
        return self.levels[0][: self.capacity]

    @property
    def total(self) -> float:
        """The sum of all values."""
        self.refresh()
        return float(self._running[-1])

    @property
    def minimum(self) -> float:
        """The smallest positive value; infinity when there is none."""
        self.refresh()
        return self._minimum

    def set(self, index: Ints, value: Doubles) -> None:
        """Write `value` [B] at `index` [B]; where an index occurs twice, the last value stays."""
        self._stale = True
        self.levels[0][index] = value
        node = index
        for level in range(1, len(self.levels)):
            node = node >> BITS
            if node.size > ARITY:
                node = np.unique(node)
            children = self.levels[level - 1].reshape(-1, ARITY).take(node, axis=0)
            # accumulate adds in order, unlike sum, so that every implementation gets the same bits
            self.levels[level][node] = np.add.accumulate(children, axis=1)[:, -1]
            if level == 1:
                positive = np.where(children > 0.0, children, np.inf)
            else:
                positive = self.min_levels[level - 2].reshape(-1, ARITY).take(node, axis=0)
            self.min_levels[level - 1][node] = np.minimum.reduce(positive, axis=1)

    def draw(self, uniform: Doubles) -> tuple[Ints, Doubles]:
        """Return one index [B] from each of B equal parts of the total, `uniform` [B] of the way, and their values."""
        size = len(uniform)
        index = self.find((np.arange(size) + uniform) * (self.total / size))
        return index, self.get(index)

    def find(self, mass: Doubles) -> Ints:
        """Return for each mass [B] in [0, total) the index whose share of the running sum of values holds it."""
        self.refresh()
        running = self._running
        mass = np.minimum(mass, np.nextafter(running[-1], 0.0))
        node = running.searchsorted(mass, side="right") - 1
        mass = mass - running.take(node)
        for level in range(len(self.levels) - 1, 0, -1):
            shares = np.zeros((len(node), ARITY + 1))
            children = self.levels[level - 1].reshape(-1, ARITY).take(node, axis=0)
            np.add.accumulate(children, axis=1, out=shares[:, 1:])
            # what rounding left over must not fall off the node's end, onto a leaf that is not there
            mass = np.minimum(mass, np.nextafter(shares[:, -1], 0.0))
            child = (shares[:, 1:] > mass[:, None]).argmax(axis=1)
            mass = mass - shares.take(child + np.arange(0, shares.size, ARITY + 1))
            node = (node << BITS) + child
        return node

    def rebuild(self, leaves: Doubles) -> None:
        """Replace all values by `leaves` [n], zeros after them."""
        self.sums[:] = 0.0
        self.mins[:] = np.inf
        if len(leaves):
            self.set(np.arange(len(leaves)), leaves)
        self._stale = True

    def refresh(self) -> None:
        """Bring the tops' running sum and the minimum up to date."""
        if self._stale:
            np.add.accumulate(self.levels[-1], out=self._running[1:])
            self._minimum = float(self.min_levels[-1].min())
            self._stale = False


def make_sum_tree(capacity: int) -> SumTree:
    """Return the compiled tree where numba is installed, else the NumPy one; QFLEET_NO_NUMBA=1 forces the latter."""
    if os.environ.get("QFLEET_NO_NUMBA") != "1" and importlib.util.find_spec("numba") is not None:
        from qfleet.replay.sumtree_numba import CompiledSumTree

        return CompiledSumTree(capacity)
    return SumTree(capacity)
