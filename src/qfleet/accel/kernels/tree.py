"""Kernels of the sum tree on the device: one launch draws a batch with its records, one to three write one back."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qfleet.accel.kernels.launch import require_dense
from qfleet.replay.device_tree import ARITY, DeviceTree

FEW = 128
"""Up to this many leaves one program writes all levels."""
MANY = 4096
"""Above this the multiprocessors have no room for one program per item drawn."""


class Records(NamedTuple):
    """What is known of each leaf of a [time, environment] grid besides its value."""

    action: Tensor  # [T * E] numbers of any dtype
    reward: Tensor  # [T * E] float32
    discount: Tensor  # [T * E] float32
    stamp: Tensor  # [T] int64: the generation of all rows of one tick
    envs: int


class Draw(NamedTuple):
    """What one draw writes."""

    row: Tensor  # [B] int64: the leaf
    value: Tensor  # [B] float32
    weight: Tensor  # [B] float32
    action: Tensor  # [B] int64
    reward: Tensor  # [B] float32
    discount: Tensor  # [B] float32
    generation: Tensor  # [B] int64


class PriorityRule(NamedTuple):
    """How priorities become leaves, and the numbers that each write updates; see `DevicePriorities`."""

    highest: Tensor  # [] float32: the decayed maximum of all priorities written
    unit: Tensor  # [] float32: what leaves are divided by, 0 before the first write
    fresh: Tensor  # [] float32: the leaf of a new item
    alpha: float
    epsilon: float
    decay: float
    ticks: Tensor  # [] int64: ticks of the grid so far
    span: int
    """An item older than this many ticks is stale."""


def empty_draw(size: int, device: torch.device) -> Draw:
    """Return room for a draw of `size` items."""
    whole, real = torch.empty(3, size, dtype=torch.int64, device=device), torch.empty(4, size, device=device)
    return Draw(whole[0], real[0], real[1], whole[1], real[2], real[3], whole[2])


def descend(tree: DeviceTree, uniform: Tensor, beta: Tensor, records: Records, out: Draw) -> Draw:
    """Draw one leaf from each of B equal parts of the tree's sum, with its record, in one launch.

    `uniform` [B] in [0, 1) says how far into its part each one lies. The weight is (smallest positive leaf / value) to
    the power `beta` []; in an empty tree row, value and weight are 0.
    """
    require_dense(uniform, *records[:-1], *out)
    size, tops = len(uniform), len(tree.levels[-1])
    # the compiler's scan cannot do with one child, so a tree of one node at the top gets an empty second one
    items, tops_power = 1 if size <= MANY else 4, max(2, triton.next_power_of_2(tops))
    _descend[(triton.cdiv(size, items),)](
        tree.sums, tree.min_levels[-1], uniform, beta, *records[:-1], *out, size, records.envs,
        _offsets(tree), tops, tops_power, ARITY, items, num_warps=max(items, tops_power // 256),
    )  # fmt: skip
    return out


def write_priorities(tree: DeviceTree, index: Tensor, generation: Tensor, priority: Tensor, rule: PriorityRule) -> None:
    """Write (priority [M] + epsilon)^alpha / unit to the leaves `index` [M] and all nodes above, and what `rule` keeps.

    Nothing comes of a priority that is negative or not finite, whose `generation` [M] is stale, or whose leaf is 0; of
    several for one leaf the largest stays.
    """
    require_dense(index, generation, priority)
    size, offsets = len(index), _offsets(tree)
    write = (tree.sums, index, generation, priority, *rule, size)
    # At B = 32 the chain of dependent launches is what costs, so one program does all levels with barriers between
    # them. At B = 1024 its one multiprocessor would take longer to read the children of all nodes than the launches.
    if size <= FEW:
        _write_all[(1,)](*write, tree.mins, offsets, ARITY, triton.next_power_of_2(size), num_warps=16)
        return
    _write_some[(triton.cdiv(size, 16),)](*write, 16, 512, num_warps=8)
    for up in range(1, len(offsets)):
        _lift_some[(triton.cdiv(size, 4),)](tree.sums, tree.mins, index, size, up, offsets, ARITY, 4, num_warps=2)


def replace_rows(tree: DeviceTree, start: Tensor, added: Tensor, fresh: Tensor) -> None:
    """Write `added` [E] times `fresh` [] to the leaves from `start[0]` on, zeros to those from `start[1]` on.

    One program does all of it: neighbours share their nodes, so there is little to do.
    """
    require_dense(start, added)
    _replace_rows[(1,)](
        tree.sums, tree.mins, start, added, fresh, len(added), _offsets(tree), ARITY, 512, 32, num_warps=16
    )


def _offsets(tree: DeviceTree) -> tuple[int, ...]:
    """Return where each level begins in `tree.sums`, leaves first."""
    return tuple(accumulate((len(level) for level in tree.levels[:-1]), initial=0))


@triton.jit
def _descend(
    sums, top_mins, uniforms, beta, actions, rewards, discounts, stamps, row_out, value_out, weight_out, action_out,
    reward_out, discount_out, generation_out, size, envs,
    offsets: tl.constexpr, tops: tl.constexpr, tops_power: tl.constexpr, arity: tl.constexpr, items: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * items + tl.arange(0, items)
    live = item < size
    depth: tl.constexpr = len(offsets) - 1
    place = tl.arange(0, tops_power)
    top = tl.load(sums + offsets[depth] + place, mask=place < tops, other=0.0)[None, :].to(tl.float64)
    minimum = tl.min(tl.load(top_mins + place, mask=place < tops, other=float("inf")), axis=0)
    # float32 could hardly tell the shares of a million leaves apart
    uniform = tl.load(uniforms + item, mask=live, other=0.0).to(tl.float64)
    node, rest = _choose(top, (item + uniform) * (tl.sum(top) / size))
    node = node.to(tl.int64)
    for down in tl.static_range(1, depth + 1):
        first = sums + offsets[depth - down] + node * arity
        chosen, rest = _choose(tl.load(first[:, None] + tl.arange(0, arity)[None, :]).to(tl.float64), rest)
        node = node * arity + chosen
    # all loads stand before the first store, so that none waits for another
    value, action = tl.load(sums + node), tl.load(actions + node).to(tl.int64)
    reward, discount, generation = tl.load(rewards + node), tl.load(discounts + node), tl.load(stamps + node // envs)
    relative = tl.minimum(minimum / tl.where(value > 0, value, 1.0), 1.0)  # finite in an empty tree too
    power = tl.exp2(tl.load(beta) * tl.log2(relative))
    tl.store(row_out + item, node, mask=live)
    tl.store(value_out + item, value, mask=live)
    tl.store(weight_out + item, tl.where(value > 0, power, 0.0), mask=live)
    tl.store(action_out + item, action, mask=live)
    tl.store(reward_out + item, reward, mask=live)
    tl.store(discount_out + item, discount, mask=live)
    tl.store(generation_out + item, generation, mask=live)


@triton.jit
def _choose(children, rest):
    """Return which of the children [I or 1, N] of its node holds each mass `rest` [I], and how far that lies in it."""
    lane = tl.arange(0, children.shape[1])[None, :]
    there = children > 0
    ends = tl.cumsum(children, axis=1)
    # sums are rounded, and those of a parallel scan need not even ascend: a child of 0 may seem to hold a mass, and a
    # mass may lie beyond the last share; it then takes the last child that is there
    holds = there & (ends > rest[:, None])
    last = tl.max(tl.where(there, lane, 0), axis=1)
    place = tl.minimum(tl.min(tl.where(holds, lane, children.shape[1]), axis=1), last)
    before = tl.min(tl.where(holds, ends - children, rest[:, None]), axis=1)
    return place, rest - before


@triton.jit
def _write_all(
    sums, index, generation, priority, highest, unit, fresh, alpha, epsilon, decay, ticks, span, size: tl.constexpr,
    mins, offsets: tl.constexpr, arity: tl.constexpr, items: tl.constexpr,
):  # fmt: skip
    item = tl.arange(0, items)
    live = item < size
    leaf = tl.load(index + item, mask=live, other=0)
    _write_leaves(
        sums, index, generation, priority, highest, unit, fresh, alpha, epsilon, decay, ticks, span, size, item, items
    )
    for up in tl.static_range(1, len(offsets)):
        tl.debug_barrier()
        _lift_nodes(sums, mins, leaf // arity**up, live, up, offsets, arity)


@triton.jit
def _write_some(
    sums, index, generation, priority, highest, unit, fresh, alpha, epsilon, decay, ticks, span, size: tl.constexpr,
    items: tl.constexpr, others: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * items + tl.arange(0, items)
    _write_leaves(
        sums, index, generation, priority, highest, unit, fresh, alpha, epsilon, decay, ticks, span, size, item, others
    )


@triton.jit
def _lift_some(
    sums, mins, index, size, up: tl.constexpr, offsets: tl.constexpr, arity: tl.constexpr, items: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * items + tl.arange(0, items)
    leaf = tl.load(index + item, mask=item < size, other=0)
    _lift_nodes(sums, mins, leaf // arity**up, item < size, up, offsets, arity)


@triton.jit
def _write_leaves(
    sums, index, generation, priority, highest, unit, fresh, alpha, epsilon, decay, ticks, span, size: tl.constexpr,
    item, others: tl.constexpr,
):  # fmt: skip
    """Write the leaves of the items [I]; each looks for its leaf among all items, so that repeats write the same."""
    leaf = tl.load(index + item, mask=item < size, other=-1)
    there = tl.load(sums + leaf, mask=item < size, other=0.0) > 0
    oldest, before = tl.load(ticks) - span, tl.load(unit)
    counts = (tl.program_id(0) == 0) | (before == 0)  # only then is the largest of all priorities asked for
    largest, most = tl.full(item.shape, -1.0, tl.float32), tl.full([others], -1.0, tl.float32)
    for first in range(0, size, others):
        other = first + tl.arange(0, others)
        offer = tl.load(priority + other, mask=other < size, other=-1.0)
        current = tl.load(generation + other, mask=other < size, other=0) >= oldest
        offer = tl.where(current & (offer >= 0) & (offer < float("inf")), offer, -1.0)  # NaN compares as false
        place = tl.load(index + other, mask=other < size, other=-2)
        largest = tl.maximum(largest, tl.max(tl.where(leaf[:, None] == place[None, :], offer[None, :], -1.0), axis=1))
        present = tl.load(sums + place, mask=counts & (other < size), other=0.0) > 0
        most = tl.maximum(most, tl.where(present, offer, -1.0))
    raised = tl.maximum(tl.max(most, axis=0), tl.load(highest) * decay)
    value = _power(raised, epsilon, alpha)
    # programs that find the unit already set by the first one find what they would set it to
    divisor = tl.where(before > 0, before, value)
    writes = (tl.program_id(0) == 0) & (tl.max(most, axis=0) >= 0)
    tl.store(highest, raised, mask=writes)
    tl.store(unit, divisor, mask=writes)
    tl.store(fresh, value / divisor, mask=writes)
    # no leaf may vanish, and the sum of 2^31 of them must stay finite
    new = tl.minimum(tl.maximum(_power(largest, epsilon, alpha) / divisor, 2.0**-126), 2.0**96)
    tl.store(sums + leaf, new, mask=there & (largest >= 0))


@triton.jit
def _power(priority, epsilon, alpha):
    return tl.exp2(tl.log2(tl.maximum(priority, 0.0) + epsilon) * alpha)


@triton.jit
def _lift_nodes(sums, mins, node, live, up: tl.constexpr, offsets: tl.constexpr, arity: tl.constexpr):
    """Write sum and minimum of the nodes [I] that are `up` levels above the leaves from their children."""
    child = node[:, None] * arity + tl.arange(0, arity)[None, :]
    children = tl.load(sums + offsets[up - 1] + child, mask=live[:, None], other=0.0)
    if up == 1:
        lowest = tl.where(children > 0, children, float("inf"))
    else:
        lowest = tl.load(mins + offsets[up - 1] - offsets[1] + child, mask=live[:, None], other=float("inf"))
    # in float64 the order of addition, which depends on the number of items, does not show
    tl.store(sums + offsets[up] + node, tl.sum(children.to(tl.float64), axis=1).to(tl.float32), mask=live)
    tl.store(mins + offsets[up] - offsets[1] + node, tl.min(lowest, axis=1), mask=live)


@triton.jit
def _replace_rows(
    sums, mins, start, added, fresh,
    envs: tl.constexpr, offsets: tl.constexpr, arity: tl.constexpr, block: tl.constexpr, items: tl.constexpr,
):  # fmt: skip
    inside, leaving, value = tl.load(start), tl.load(start + 1), tl.load(fresh)
    for first in range(0, envs, block):
        env = first + tl.arange(0, block)
        new = tl.load(added + env, mask=env < envs, other=0.0) * value
        tl.store(sums + inside + env, new, mask=env < envs)
        tl.store(sums + leaving + env, tl.zeros_like(new), mask=env < envs)
    for up in tl.static_range(1, len(offsets)):
        tl.debug_barrier()
        for first in range(0, (envs + arity**up - 2) // arity**up + 1, items):
            number = first + tl.arange(0, items)
            _lift_run(sums, mins, inside, number, envs, up, offsets, arity)
            _lift_run(sums, mins, leaving, number, envs, up, offsets, arity)


@triton.jit
def _lift_run(
    sums, mins, start, number, envs: tl.constexpr, up: tl.constexpr, offsets: tl.constexpr, arity: tl.constexpr,
):  # fmt: skip
    """Lift those of the nodes [I], counted by `number` from the one above `start`, that are above its E leaves."""
    node = start // arity**up + number
    _lift_nodes(sums, mins, node, node <= (start + envs - 1) // arity**up, up, offsets, arity)
