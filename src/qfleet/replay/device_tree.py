"""A wide sum tree in tensors: nothing here waits for the device, so that a loop with it can be compiled or captured.

The leaves are grouped by 64 until at most 2048 nodes are left: a million leaves take two steps down, and a step costs
a few launches whatever its width. An inner node is always recomputed from its children, so the tree cannot drift from
its leaves. A step down compares running sums of whole numbers, which are exact in any order of addition: a leaf of 0
is never drawn, and the same numbers draw the same leaves on a device whose float sums may not be repeatable.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from qfleet.core.role import State

BITS = 6
ARITY = 1 << BITS
MOST_TOPS = 2048
TREE_BYTES = 4 * (1 + 2 / (ARITY - 1))
"""What a large tree takes for each leaf: its value and its share of the inner nodes' sums and minima."""
QUANTUM = 2.0**-50
"""The part of the total that counts as one when values are rounded up to whole numbers."""
LEAST = 1e-36
"""Added to that part, so that a tree of zeros has one; too little to matter beside any other."""


class DeviceTree:
    """Non-negative float32 values by index; a value of 0 means that the index is not there.

    The index `capacity` is a spare leaf for writes that must change nothing: give it the value 0.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Make a tree of zeros for the indices below `capacity`."""
        lengths = level_lengths(capacity)
        ends = list(accumulate(lengths, initial=0))
        self.capacity = capacity
        self.sums = torch.zeros(ends[-1], device=device)
        self.mins = torch.full((ends[-1] - lengths[0],), math.inf, device=device)
        """The smallest positive leaf under each inner node; node i of `sums` is node i - `lengths[0]` here."""
        self.levels = [self.sums[a:b] for a, b in pairwise(ends)]
        """The leaves, padded with zeros, then the inner nodes level by level up to the tops."""
        self.min_levels = [self.mins[a - lengths[0] : b - lengths[0]] for a, b in pairwise(ends[1:])]

    @property
    def leaves(self) -> Tensor:
        """All values [capacity] (a view; write through `set` only)."""
        return self.levels[0][: self.capacity]

    @property
    def total(self) -> Tensor:
        """The sum of all values, a scalar."""
        return self.levels[-1].sum()

    @property
    def minimum(self) -> Tensor:
        """The smallest positive value, a scalar; infinity when there is none."""
        return self.min_levels[-1].amin()

    def set(self, index: Tensor, value: Tensor) -> None:
        """Write `value` [M] at `index` [M] int64; where an index occurs twice, the largest value stays."""
        leaves = self.levels[0]
        leaves.index_fill_(0, index, 0.0)
        leaves.scatter_reduce_(0, index, value, "amax")
        lift(self.levels, self.min_levels, index >> BITS)

    def set_block(self, start: Tensor, values: Tensor) -> None:
        """Write R runs of E neighbours: `values` [R, E] at `start` [R] int64 and after; runs must not overlap."""
        size, device = values.shape[1], values.device
        index = start.unsqueeze(1) + torch.arange(size, device=device)
        self.levels[0].scatter_(0, index.view(-1), values.view(-1))
        # a run that begins anywhere in a node touches at most this many
        nodes = (start >> BITS).unsqueeze(1) + torch.arange((size + ARITY - 2) // ARITY + 1, device=device)
        lift(self.levels, self.min_levels, nodes.clamp_(max=len(self.levels[1]) - 1).view(-1))

    def draw(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return one index [B] from each of B equal parts of the total, and its value [B].

        `uniform` [B] float64 in [0, 1) says how far into its part each one lies. In a tree of zeros the values are 0.
        """
        size = len(uniform)
        part = torch.arange(size, dtype=torch.float64, device=uniform.device)
        return descend(self.levels, (part + uniform) / size)

    def state_dict(self) -> State:
        """Return all nodes: a device may round the sums of a rebuilt tree in another way."""
        return {"sums": self.sums.to("cpu", copy=True), "mins": self.mins.to("cpu", copy=True)}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`, in the tensors that are there."""
        self.sums.copy_(state["sums"])
        self.mins.copy_(state["mins"])


def level_lengths(capacity: int) -> list[int]:
    """Return how many nodes each level has, leaves first, for `capacity` leaves and the spare one."""
    depth = 1
    while -(-(capacity + 1) // ARITY**depth) > MOST_TOPS:
        depth += 1
    tops = -(-(capacity + 1) // ARITY**depth)
    return [tops * ARITY ** (depth - level) for level in range(depth + 1)]


def tree_bytes(capacity: int) -> int:
    """Return the bytes of a tree's nodes."""
    leaves, *inner = level_lengths(capacity)
    return 4 * (leaves + 2 * sum(inner))


def lift(levels: list[Tensor], min_levels: list[Tensor], nodes: Tensor) -> None:
    """Recompute the lowest inner nodes `nodes` [M] (repeats allowed), and all nodes above: those are few."""
    children = levels[0].view(-1, ARITY).index_select(0, nodes)
    levels[1].index_copy_(0, nodes, children.sum(1))
    min_levels[0].index_copy_(0, nodes, F.threshold(children, 0.0, math.inf).amin(1))
    for lower, upper in pairwise(levels[1:]):
        torch.sum(lower.view(-1, ARITY), 1, out=upper)
    for lower, upper in pairwise(min_levels):
        torch.amin(lower.view(-1, ARITY), 1, out=upper)


def descend(levels: list[Tensor], fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices [B] of the leaves that hold `fraction` [B] float64 of the total, and their values [B].

    A fraction must lie in [0, 1]; the leaf's share of the running sum of all leaves holds it.
    """
    tops = levels[-1].unsqueeze(0)
    unit = tops.sum() * QUANTUM + LEAST
    parts, ends = _running(tops, unit)
    mass = (fraction * ends[0, -1]).long().unsqueeze(0)
    place = _locate(ends, mass)
    node = place.view(-1)
    for level in reversed(levels[:-1]):
        mass = (mass - ends.gather(1, place) + parts.gather(1, place)).view(-1, 1)
        children = level.view(-1, ARITY).index_select(0, node)
        parts, ends = _running(children, unit)
        place = _locate(ends, mass)
        node = torch.add(place.view(-1), node, alpha=ARITY)
    return node, children.gather(1, place).view(-1)


def _running(children: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Return the children [N, A] of N nodes in whole units, at least 1 unless they are 0, and their running sum."""
    parts = (children / unit).ceil_().long()
    return parts, parts.cumsum(1)


def _locate(ends: Tensor, mass: Tensor) -> Tensor:
    """Return the places [N, K] in the running sums [N, A] that hold K masses [N, K] each.

    Where the rounding of a node's sum takes a mass beyond its children, it goes to the last of them that is not 0.
    Among zeros alone the first place is returned.
    """
    return torch.searchsorted(ends, torch.minimum(mass, ends[:, -1:] - 1), right=True)
