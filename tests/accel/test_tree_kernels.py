"""The kernels of the sum tree against running sums in float64 and a dictionary of leaves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from compile_for_hopper import compile_for_hopper
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from qfleet.accel.kernels.tree import (
    Draw,
    PriorityRule,
    Records,
    descend,
    empty_draw,
    replace_rows,
    write_priorities,
)
from qfleet.replay.device_priorities import DevicePriorities
from qfleet.replay.device_tree import ARITY, DeviceTree
from qfleet.replay.samplers import PrioritisedConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW = settings(max_examples=12, deadline=None)
ENVS = 4
SMALL_DRAWS = [(capacity, size) for capacity in (1, 2, 63, ARITY, ARITY + 1, 20 * ARITY) for size in (1, 8192)]


def on_device(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.as_tensor(np.asarray(values)).to(DEVICE, dtype)


def tree_of(leaves: np.ndarray) -> DeviceTree:
    tree = DeviceTree(len(leaves), DEVICE)
    tree.set(torch.arange(len(leaves), device=DEVICE), on_device(leaves, torch.float32))
    return tree


def random_leaves(rng: np.random.Generator, capacity: int) -> np.ndarray:
    """Values of very different sizes, most of them and whole subtrees not there."""
    leaves = rng.choice([0.0, 1e-3, 1.0, 50.0], capacity) * rng.random(capacity)
    for _ in range(3):
        first = rng.integers(capacity)
        leaves[first : first + 3 * ARITY] = 0.0
    leaves[rng.integers(capacity)] = 1.0
    return leaves.astype(np.float32)


def random_records(rng: np.random.Generator, capacity: int) -> Records:
    ticks = -(-capacity // ENVS)
    reward, discount = rng.random((2, ticks * ENVS))
    return Records(
        on_device(rng.integers(0, 18, ticks * ENVS)),
        on_device(reward, torch.float32),
        on_device(discount, torch.float32),
        on_device(rng.integers(0, 10**12, ticks)),
        ENVS,
    )


def draw(tree: DeviceTree, uniform: np.ndarray, beta: float, records: Records) -> Draw:
    scalar = torch.tensor(beta, device=DEVICE)
    return descend(tree, on_device(uniform, torch.float64), scalar, records, empty_draw(len(uniform), DEVICE))


@FEW
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 63, 64, 65, 1000, 5000, 70_000]), st.integers(1, 7))
def test_a_draw_finds_the_leaf_that_holds_its_mass(seed, capacity, size):
    rng = np.random.default_rng(seed)
    leaves, uniform = random_leaves(rng, capacity), rng.random(size)
    drawn = draw(tree_of(leaves), uniform, 0.5, random_records(rng, capacity))
    index = drawn.row.cpu().numpy()
    ends = leaves.astype(np.float64).cumsum()
    mass = (np.arange(size) + uniform) / size * ends[-1]
    rounding = 1e-6 * ends[-1]
    assert (leaves[index] > 0).all()
    assert (ends[index] > mass - rounding).all()
    assert (ends[index] - leaves[index] <= mass + rounding).all()
    assert np.array_equal(drawn.value.cpu().numpy(), leaves[index])


@FEW
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 1.0))
def test_a_draw_brings_weights_and_records(seed, beta):
    rng = np.random.default_rng(seed)
    leaves = random_leaves(rng, 300)
    records = random_records(rng, 300)
    drawn = draw(tree_of(leaves), rng.random(5), beta, records)
    index = drawn.row.cpu().numpy()
    weight = (leaves[leaves > 0].min().astype(np.float64) / leaves[index]) ** beta
    assert np.allclose(drawn.weight.cpu().numpy(), weight, rtol=2e-6)
    for got, column in (
        (drawn.action, records.action),
        (drawn.reward, records.reward),
        (drawn.discount, records.discount),
    ):
        assert torch.equal(got, column[drawn.row])
    assert torch.equal(drawn.generation, records.stamp[drawn.row // ENVS])


def test_draws_agree_with_the_tree_of_torch():
    rng = np.random.default_rng(5)
    tree, uniform = tree_of(random_leaves(rng, 40_000)), rng.random(64)
    index, value = tree.draw(on_device(uniform, torch.float64))
    drawn = draw(tree, uniform, 1.0, random_records(rng, 40_000))
    assert torch.equal(drawn.row, index)
    assert torch.equal(drawn.value, value)


@pytest.mark.parametrize("capacity", [100, 5000])
def test_the_ends_of_the_total_never_meet_a_zero(capacity):
    leaves = np.zeros(capacity, np.float32)
    there = [3, 17, 90]
    leaves[there] = [0.1, 1e-7, 0.3]  # sums of these are rounded
    uniform = np.array([0.0, 0.5, 1.0])  # 1 is what float32 makes of the largest numbers below it
    drawn = draw(tree_of(leaves), uniform, 1.0, random_records(np.random.default_rng(0), capacity))
    assert drawn.row.tolist()[::2] == [3, 90]


def test_an_empty_tree_gives_nothing():
    drawn = draw(DeviceTree(200, DEVICE), np.array([0.2, 0.9]), 0.0, random_records(np.random.default_rng(0), 200))
    assert drawn.row.tolist() == drawn.value.tolist() == drawn.weight.tolist() == [0, 0]


def test_many_draws_share_programs(monkeypatch):
    monkeypatch.setattr("qfleet.accel.kernels.tree.MANY", 8)
    rng = np.random.default_rng(6)
    leaves = np.zeros(100, np.float32)
    leaves[[7, 40, 99]] = [1.0, 2.0, 5.0]
    size = 41
    drawn = draw(tree_of(leaves), np.full(size, 0.5), 1.0, random_records(rng, 100))
    expected = np.repeat([7, 40, 99], [size // 8, size // 4, size - size // 8 - size // 4])
    assert np.array_equal(drawn.row.cpu().numpy(), expected)


def naive_levels(tree: DeviceTree, leaves: np.ndarray) -> None:
    """Check all nodes of a tree against its leaves, computed anew."""
    children = np.zeros(len(tree.levels[0]), np.float32)
    children[: len(leaves)] = leaves
    assert np.array_equal(tree.levels[0].cpu().numpy(), children)
    sums, mins = children.astype(np.float64), np.where(children > 0, children, np.inf)
    for level, min_level in zip(tree.levels[1:], tree.min_levels, strict=True):
        sums, mins = sums.reshape(-1, ARITY).sum(1), mins.reshape(-1, ARITY).min(1)
        np.testing.assert_allclose(level.cpu().numpy(), sums, rtol=1e-6)
        assert np.array_equal(min_level.cpu().numpy(), mins)


SPAN = 10
TICKS = 100


def priorities(leaves: np.ndarray, rule: PrioritisedConfig) -> DevicePriorities:
    held = DevicePriorities(rule, len(leaves), DEVICE)
    held.tree.set(torch.arange(len(leaves), device=DEVICE), on_device(leaves, torch.float32))
    return held


def write(held: DevicePriorities, index: Tensor, generation: Tensor, priority: Tensor, rule: PrioritisedConfig) -> None:
    scalars, ticks = (held.highest, held.unit, held.fresh), torch.tensor(TICKS, device=DEVICE)
    full = PriorityRule(*scalars, rule.alpha, rule.epsilon, rule.max_decay, ticks, SPAN)
    write_priorities(held.tree, index, generation, priority, full)


class NaivePriorities:
    """Leaves, and what comes of writes to them, in Python's numbers."""

    def __init__(self, leaves: np.ndarray, rule: PrioritisedConfig) -> None:
        self.leaves, self.rule = leaves.astype(np.float64), rule
        self.highest, self.unit, self.fresh = 0.0, 0.0, 1.0

    def value(self, priority: float) -> float:
        return (priority + self.rule.epsilon) ** self.rule.alpha

    def write(self, index: list[int], generation: list[int], priority: list[float]) -> None:
        offers: dict[int, float] = {}
        for i, g, p in zip(index, generation, priority, strict=True):
            if g >= TICKS - SPAN and 0 <= p < math.inf and self.leaves[i] > 0:
                offers[i] = max(offers.get(i, 0.0), p)
        if offers:
            self.highest = max(max(offers.values()), self.highest * self.rule.max_decay)
            self.unit = self.unit or self.value(self.highest)
            self.fresh = self.value(self.highest) / self.unit
        for i, p in offers.items():
            self.leaves[i] = self.value(p) / self.unit


@FEW
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 64, 5000, 140_000]),
    st.sampled_from([1, 2, 31, 128, 129, 150]),
    st.floats(0.0, 1.0),
)
def test_priorities_become_leaves_and_all_nodes_above(seed, capacity, size, alpha):
    rng = np.random.default_rng(seed)
    leaves, rule = random_leaves(rng, capacity), PrioritisedConfig(alpha=alpha, max_decay=0.5)
    naive, held = NaivePriorities(leaves, rule), priorities(leaves, rule)
    for _ in range(2):
        index = rng.integers(0, max(capacity // int(rng.integers(1, 100)), 1), size)  # now and then with repeats
        generation = rng.integers(TICKS - SPAN - 3, TICKS, size)
        priority = rng.choice([0.0, 1e-3, 0.5, 2.0, 9.0, math.nan, math.inf, -1.0], size).astype(np.float32)
        naive.write(index.tolist(), generation.tolist(), priority.tolist())
        write(held, on_device(index), on_device(generation), on_device(priority, torch.float32), rule)
        np.testing.assert_allclose(held.tree.leaves.cpu().numpy(), naive.leaves, rtol=3e-6)
        naive_levels(held.tree, held.tree.leaves.cpu().numpy())
        for got, expected in ((held.highest, naive.highest), (held.unit, naive.unit), (held.fresh, naive.fresh)):
            assert math.isclose(float(got), expected, rel_tol=3e-6)


def test_writes_agree_with_the_priorities_of_torch():
    rng = np.random.default_rng(8)
    leaves, rule = random_leaves(rng, 3000), PrioritisedConfig(max_decay=0.5)
    ours, theirs = priorities(leaves, rule), priorities(leaves, rule)
    for size in (200, 20):
        index, generation = on_device(rng.integers(0, 100, size)), on_device(rng.integers(85, 100, size))
        priority = on_device(rng.exponential(size=size), torch.float32)
        write(ours, index, generation, priority, rule)
        theirs.update(index, generation >= TICKS - SPAN, priority)
        for name in ("highest", "unit", "fresh"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=3e-6, atol=0.0)
        torch.testing.assert_close(ours.tree.sums, theirs.tree.sums, rtol=3e-6, atol=0.0)
        torch.testing.assert_close(ours.tree.mins, theirs.tree.mins, rtol=3e-6, atol=0.0)


@pytest.mark.parametrize("size", [4, 200])
def test_no_priority_takes_a_leaf_away_or_breaks_the_sum(size):
    rule = PrioritisedConfig(alpha=1.0, epsilon=1e-38)
    held = priorities(np.ones(200), rule)
    index = torch.arange(size, device=DEVICE)
    write(held, index, index + TICKS, torch.ones(size, device=DEVICE), rule)
    priority = on_device(np.where(np.arange(size) % 2, 3e38, 0.0), torch.float32)
    write(held, index, index + TICKS, priority, rule)
    assert (held.tree.leaves[:size] > 0).all()
    assert math.isfinite(float(held.tree.total))


def test_the_order_and_number_of_items_does_not_show():
    rng, rule = np.random.default_rng(7), PrioritisedConfig()
    index = on_device(rng.permutation(5000)[:140])
    generation, priority = index + TICKS, on_device(rng.random(140), torch.float32)
    trees = []
    for order in (torch.arange(140), torch.arange(140).flip(0)):
        for parts in (1, 2):  # 140 at once, or twice 70 in the small launch
            held = priorities(np.ones(5000), rule)
            write(held, index[:1], generation[:1], priority[:1], rule)  # sets the unit
            for part in order.to(DEVICE).chunk(parts):
                write(held, index[part], generation[part], priority[part], rule)
            trees.append(held.tree)
    for tree in trees[1:]:
        assert torch.equal(trees[0].sums, tree.sums)
        assert torch.equal(trees[0].mins, tree.mins)


@FEW
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 64, 65, 600, 2200]), st.sampled_from([4, 90]))
def test_rows_are_replaced(seed, envs, length):
    rng = np.random.default_rng(seed)
    leaves = random_leaves(rng, envs * length)
    tree, fresh = tree_of(leaves), torch.tensor(0.7, device=DEVICE)
    start, added = envs * rng.permutation(length)[:2], rng.integers(0, 2, envs)
    replace_rows(tree, on_device(start), on_device(added, torch.float32), fresh)
    leaves[start[0] : start[0] + envs] = added * np.float32(0.7)
    leaves[start[1] : start[1] + envs] = 0.0
    naive_levels(tree, leaves)


def test_tensors_with_gaps_are_refused():
    start, added = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.zeros(4, 2, device=DEVICE)[:, 0]
    with pytest.raises(ValueError, match="contiguous"):
        replace_rows(DeviceTree(8, DEVICE), start, added, torch.zeros((), device=DEVICE))


def every_launch() -> None:
    """Call each kernel for a million leaves, also with sizes of 1, for which the compiler makes other code; then draw
    from trees of every other width at the top."""
    device = torch.device("cpu")
    tree, stamp, scalar = DeviceTree(1_000_000, device), torch.zeros(2, dtype=torch.int64), torch.zeros(())
    for size, envs in ((8192, 16), (1, 1)):
        index, value = torch.zeros(size, dtype=torch.int64), torch.zeros(size)
        descend(tree, value.double(), scalar, Records(stamp, value, value, stamp, envs), empty_draw(size, device))
        rule = PriorityRule(scalar, scalar, scalar, 0.6, 1e-6, 0.9995, stamp[0], 1000)
        write_priorities(tree, index, index, value, rule)
        replace_rows(tree, stamp, torch.zeros(envs), scalar)
    for capacity, size in SMALL_DRAWS:
        value = torch.zeros(size)
        records = Records(stamp, value, value, stamp, 1)
        descend(DeviceTree(capacity, device), value.double(), scalar, records, empty_draw(size, device))


def test_the_kernels_compile_for_an_h200(tmp_path):
    assert len(compile_for_hopper("test_tree_kernels", tmp_path)) == 2 + (3 + 1) + 2 + len(SMALL_DRAWS)
