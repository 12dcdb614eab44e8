"""A wide sum tree over the rows of a replay, with the minimum kept too, so that importance weights are exact.

The leaves are grouped by 32 until at most 1024 nodes are left; these tops are searched through their running sum.
An inner node is always recomputed from its children, in their order: the tree cannot drift from its leaves. The
compiled variant in `compiled` holds the same values and finds the same indices but for the rounding of sums.
"""

from __future__ import annotations

import math
import os
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qfleet.core.optional import import_problem
from qfleet.core.types import Ints
from qfleet.replay.allocation import Allocate, zeros

MOST_TOPS = 1024
FEW = 64
"""Below this, to sum a node twice is cheaper than to look for repetitions."""

Doubles = NDArray[np.float64]


class SumTree:
    """Non-negative values by index; a value of 0 means that the index is not there."""

    bits = 5
    """The logarithm of the number of children: for NumPy few wide levels are the fastest."""

    def __init__(self, capacity: int) -> None:
        """Make a tree of zeros for the indices below `capacity`."""
        self.arity = 1 << self.bits
        depth = 1
        while -(-capacity // self.arity**depth) > MOST_TOPS:
            depth += 1
        tops = -(-capacity // self.arity**depth)
        lengths = [tops * self.arity ** (depth - level) for level in range(depth + 1)]
        self.capacity = capacity
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.lie_in(zeros)
        self.mins = np.full(self.offsets[-1] - lengths[0], np.inf, np.float64)
        """The smallest positive leaf under each inner node; node i of `sums` is node i - `lengths[0]` here."""
        inner = self.offsets[1:] - lengths[0]
        self.min_levels = [self.mins[a:b] for a, b in pairwise(inner)]
        self._min_children = [level.reshape(-1, self.arity) for level in self.min_levels[:-1]]
        self._running = np.zeros(tops + 1, np.float64)
        self._stale = True
        self._minimum = np.inf
        """The smallest positive value, NaN when it must be looked for in `mins`."""
        self._changed = np.zeros(len(self.levels[1]), np.bool_)
        """The lowest inner nodes whose `mins` are not up to date."""
        self._parts = np.zeros(0)
        self._prepare(1)

    def lie_in(self, allocate: Allocate) -> None:
        """Take the array of all nodes from `allocate`, beginning with a cache line: few lines hold a node's children.

        A former life's array must begin with a page, so that its leaves lie where they did; call `resum` then.
        """
        size = int(self.offsets[-1])
        room = allocate("tree", (size + 7,), np.float64)
        skip = -room.ctypes.data % 64 // room.itemsize
        self.sums: Doubles = room[skip : skip + size]
        self.levels = [self.sums[a:b] for a, b in pairwise(self.offsets)]
        self._children = [level.reshape(-1, self.arity) for level in self.levels[:-1]]

    def resum(self) -> None:
        """Compute everything anew from the leaves, which stay as they are."""
        self._changed[:] = True
        self._minimum = np.nan
        self.set(np.arange(self.capacity), self.leaves.copy())

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
        if math.isnan(self._minimum):
            self._minimum = self._find_minimum()
        return self._minimum

    def set(self, index: Ints, value: Doubles) -> None:
        """Write `value` [B] at `index` [B]; where an index occurs twice, the last value stays."""
        if not len(index):
            return
        self._stale = True
        self._watch_minimum(self.sums.take(index))
        self.sums[index] = value
        node = index
        for level in range(1, len(self.levels)):
            node = node >> self.bits
            if level == 1:
                self._changed[node] = True
            if node.size > FEW:
                node = np.unique(node)
            children = self._children[level - 1].take(node, axis=0)
            self.levels[level][node] = np.add.reduce(children, axis=1)
        self._minimum = min(self._minimum, _smallest(self.sums.take(index)))

    def _watch_minimum(self, before: Doubles) -> None:
        """Forget the minimum if it is among the values [B] to be overwritten; it is seldom needed, slow to find."""
        lowest = np.minimum.reduce(before)
        if lowest == self._minimum or (lowest == 0.0 and (before == self._minimum).any()):
            self._minimum = np.nan

    def _find_minimum(self) -> float:
        node = np.flatnonzero(self._changed)
        self._changed[node] = False
        children = self._children[0].take(node, axis=0)
        self.min_levels[0][node] = np.where(children > 0.0, children, np.inf).min(axis=1)
        for smaller, larger in zip(self._min_children, self.min_levels[1:], strict=True):
            node = np.unique(node >> self.bits)
            larger[node] = smaller.take(node, axis=0).min(axis=1)
        return float(self.min_levels[-1].min())

    def draw(self, uniform: Doubles) -> tuple[Ints, Doubles]:
        """Return one index [B] from each of B equal parts of the total, and the minimum over its value [B].

        `uniform` [B] says how far into its part each one lies; it may be overwritten.
        """
        size = len(uniform)
        self._prepare(size)
        index = self.find((self._parts + uniform) * (self.total / size))
        return index, self.minimum / self.sums.take(index)

    def find(self, mass: Doubles) -> Ints:
        """Return for each mass [B] in [0, total) the index whose share of the running sum of values holds it."""
        self.refresh()
        self._prepare(len(mass))
        node, rest = _locate(self._running, mass)
        for level in range(len(self.levels) - 1, 0, -1):
            # one running sum over the children of all nodes: where rounding takes a mass over its node's end, it meets
            # the next one that is there, never a value of 0
            children = self._children[level - 1].take(node, axis=0)
            np.add.accumulate(children.reshape(-1), out=self._shares[1:])
            rest += self._shares[: -1 : self.arity]
            place, rest = _locate(self._shares, rest)
            node = node.take(place >> self.bits)
            node <<= self.bits
            node += place & (self.arity - 1)
        return node

    def _prepare(self, size: int) -> None:
        """Have room for the running sums of `size` nodes; batches mostly have one size."""
        if size != len(self._parts):
            self._parts, self._shares = np.arange(size, dtype=np.float64), np.zeros(size * self.arity + 1)

    def rebuild(self, leaves: Doubles) -> None:
        """Replace all values by `leaves` [n], zeros after them."""
        self.sums[:] = 0.0
        self.mins[:] = self._minimum = np.inf
        self._stale = True
        self.set(np.arange(len(leaves)), leaves)

    def refresh(self) -> None:
        """Bring the tops' running sum up to date."""
        if self._stale:
            np.add.accumulate(self.levels[-1], out=self._running[1:])
            self._stale = False


def _locate(running: Doubles, mass: Doubles) -> tuple[Ints, Doubles]:
    """Return for each mass [B], ascending but for rounding, the part of a running sum that holds it, and how far in."""
    if mass[-1] >= running[-1]:
        mass[-1] = math.nextafter(running[-1], 0.0)
    part = running[1:].searchsorted(mass, side="right")
    return part, mass - running.take(part)


def _smallest(values: Doubles) -> float:
    """Return the smallest positive one of `values` [B], infinity when there is none."""
    smallest = float(np.minimum.reduce(values))
    return smallest if smallest > 0.0 else float(values.min(initial=np.inf, where=values > 0.0))


def use_numba() -> bool:
    """Return whether to take the compiled loops: where numba works, unless QFLEET_NO_NUMBA=1 forbids it."""
    return not why_no_numba()


def why_no_numba() -> str:
    """Return what keeps numba from being used here; empty if nothing does."""
    return "QFLEET_NO_NUMBA=1 forbids it" if os.environ.get("QFLEET_NO_NUMBA") == "1" else numba_problem()


@cache
def numba_problem() -> str:
    """Return what is wrong with numba itself here: not installed, or it cannot be imported; empty if nothing is."""
    problem = import_problem("numba")
    return problem and f"numba {problem}" + (" (extra: fast)" if problem == "is not installed" else "")


def make_sum_tree(capacity: int) -> SumTree:
    """Return the compiled tree where numba may be used, else the NumPy one."""
    if use_numba():
        from qfleet.replay.compiled import CompiledSumTree

        return CompiledSumTree(capacity)
    return SumTree(capacity)
