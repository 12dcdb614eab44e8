"""The sum tree's loops compiled by numba; imported by `make_sum_tree` alone, compiled at first use, then cached."""

from __future__ import annotations

import numba
import numpy as np

from qfleet.core.types import Ints
from qfleet.replay.sumtree import ARITY, BITS, Doubles, SumTree


@numba.njit(cache=True)
def _set(sums: Doubles, mins: Doubles, offsets: Ints, index: Ints, value: Doubles) -> None:
    for i in range(len(index)):
        sums[index[i]] = value[i]
    inner = offsets[1]
    for level in range(1, len(offsets) - 1):
        done = -1
        for i in range(len(index)):
            node = index[i] >> (BITS * level)
            if node == done:  # neighbours share their parents
                continue
            done = node
            first = offsets[level - 1] + (node << BITS)
            total, smallest = 0.0, np.inf
            for child in range(first, first + ARITY):
                total += sums[child]
                low = mins[child - inner] if level > 1 else sums[child]
                smallest = low if 0.0 < low < smallest else smallest
            sums[offsets[level] + node] = total
            mins[offsets[level] + node - inner] = smallest


@numba.njit(cache=True)
def _descend(sums: Doubles, offsets: Ints, node: Ints, rest: Doubles) -> None:
    """Replace the top nodes [B] by the leaves that hold the masses `rest` [B] (changed)."""
    for level in range(len(offsets) - 2, 0, -1):  # level by level, so that the waits for memory overlap
        for i in range(len(node)):
            total, mass = sums[offsets[level] + node[i]], rest[i]
            if mass >= total:
                mass = np.nextafter(total, 0.0)
            child = offsets[level - 1] + (node[i] << BITS)
            below, share = 0.0, sums[child]
            while share <= mass:
                child += 1
                below = share
                share += sums[child]
            rest[i], node[i] = mass - below, child - offsets[level - 1]


@numba.njit(cache=True)
def _draw(sums: Doubles, offsets: Ints, running: Doubles, uniform: Doubles) -> tuple[Ints, Doubles]:
    size = len(uniform)
    node, rest = np.empty(size, np.int64), np.empty(size)
    part, last, top = running[-1] / size, np.nextafter(running[-1], 0.0), 0
    for i in range(size):
        mass = min((i + uniform[i]) * part, last)
        while running[top + 1] <= mass:  # the masses ascend
            top += 1
        node[i], rest[i] = top, mass - running[top]
    _descend(sums, offsets, node, rest)
    for i in range(size):
        rest[i] = sums[node[i]]
    return node, rest


@numba.njit(cache=True)
def _refresh(tops: Doubles, mins: Doubles, running: Doubles) -> float:
    total, smallest = 0.0, np.inf
    for i in range(len(tops)):
        total += tops[i]
        running[i + 1] = total
        smallest = min(smallest, mins[i])
    return smallest


class CompiledSumTree(SumTree):
    """A `SumTree` with the same results, several times faster."""

    def set(self, index: Ints, value: Doubles) -> None:
        """Write `value` [B] at `index` [B]; where an index occurs twice, the last value stays."""
        self._stale = True
        _set(self.sums, self.mins, self.offsets, index, value)

    def draw(self, uniform: Doubles) -> tuple[Ints, Doubles]:
        """Return one index [B] from each of B equal parts of the total, `uniform` [B] of the way, and their values."""
        self.refresh()
        index, value = _draw(self.sums, self.offsets, self._running, uniform)
        return index, value

    def refresh(self) -> None:
        """Bring the tops' running sum and the minimum up to date."""
        if self._stale:
            self._minimum = _refresh(self.levels[-1], self.min_levels[-1], self._running)
            self._stale = False
