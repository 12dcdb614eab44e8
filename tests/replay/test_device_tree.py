"""The tree in tensors: what it holds, what it draws, on every device that is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.replay.device_tree import ARITY, DeviceTree, descend, tree_bytes
from qfleet.replay.sumtree import SumTree

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = pytest.param("cuda", marks=GPU)
CAPACITIES = st.sampled_from([1, 63, 64, 65, 1500, 40_000, 140_000])
SEEDS = st.integers(0, 2**32 - 1)
CHI_SQUARE_9 = 27.88
"""The 99.9 % quantile for 9 degrees of freedom."""


@pytest.fixture(params=["cpu", CUDA], scope="module")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def assert_whole(tree: DeviceTree, leaves: np.typing.NDArray[np.float32]) -> None:
    """Leaves as given, every inner node what its children come to, total and minimum those of the leaves."""
    np.testing.assert_array_equal(tree.leaves.cpu().numpy(), leaves)
    assert not tree.levels[0][tree.capacity :].any()
    for lower, upper in zip(tree.levels, tree.levels[1:], strict=False):
        np.testing.assert_allclose(upper.cpu(), lower.view(-1, ARITY).double().sum(1).cpu(), rtol=1e-6)
    lowest = torch.where(tree.levels[0] > 0, tree.levels[0], torch.inf)
    for lower, upper in zip([lowest, *tree.min_levels], tree.min_levels, strict=False):
        assert torch.equal(upper, lower.view(-1, ARITY).amin(1))
    assert float(tree.total) == pytest.approx(float(leaves.astype(np.float64).sum()), rel=1e-6)
    assert float(tree.minimum) == leaves[leaves > 0].min(initial=np.inf)


def on(device: torch.device, array: np.typing.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


@settings(max_examples=40, deadline=None)
@given(capacity=CAPACITIES, seed=SEEDS, spread=st.sampled_from([1.0, 1e-3, 1e6]))
def test_a_tree_is_its_leaves(device: torch.device, capacity: int, seed: int, spread: float) -> None:
    rng, tree, leaves = np.random.default_rng(seed), DeviceTree(capacity, device), np.zeros(capacity, np.float32)
    for _ in range(6):
        index = rng.integers(capacity, size=rng.integers(1, 80))
        value = (rng.random(len(index)) ** 8 * spread * (rng.random(len(index)) < 0.7)).astype(np.float32)
        tree.set(on(device, index), on(device, value))
        leaves[index] = 0.0
        np.maximum.at(leaves, index, value)
    assert_whole(tree, leaves)


@settings(max_examples=40, deadline=None)
@given(capacity=CAPACITIES, seed=SEEDS, size=st.sampled_from([1, 16, 63, 64, 65, 130, 300]))
def test_blocks_of_neighbours_are_written(device: torch.device, capacity: int, seed: int, size: int) -> None:
    rng, tree = np.random.default_rng(seed), DeviceTree(capacity + 2 * size, device)
    leaves = np.zeros(capacity + 2 * size, np.float32)
    for _ in range(6):
        first = int(rng.integers(capacity + 1))
        start = np.array([first, first + size])[rng.permutation(2)]
        values = (rng.random((2, size)) * (rng.random((2, size)) < 0.7)).astype(np.float32)
        tree.set_block(on(device, start), on(device, values))
        for place, value in zip(start, values, strict=True):
            leaves[place : place + size] = value
    assert_whole(tree, leaves)


@settings(max_examples=40, deadline=None)
@given(capacity=CAPACITIES, seed=SEEDS, spread=st.sampled_from([1.0, 8.0, 20.0]))
def test_a_draw_finds_the_leaf_that_holds_its_mass(
    device: torch.device, capacity: int, seed: int, spread: float
) -> None:
    rng, tree = np.random.default_rng(seed), DeviceTree(capacity, device)
    index = np.unique(rng.integers(capacity, size=500))
    value = (rng.random(len(index)) ** spread * (rng.random(len(index)) < 0.7)).astype(np.float32)
    value[0] += 0.5
    tree.set(on(device, index), on(device, value))
    leaves = tree.leaves.cpu().double()
    uniform = rng.random(200)
    uniform[[0, 1, -1]] = 0.0, np.nextafter(1.0, 0.0), np.nextafter(1.0, 0.0)
    found, values = (result.cpu() for result in tree.draw(on(device, uniform)))
    assert (values > 0).all()
    assert torch.equal(values.double(), leaves[found])
    mass = torch.from_numpy((np.arange(200) + uniform) / 200 * float(leaves.sum()))
    ends, slack = leaves.cumsum(0)[found], 1e-6 * float(leaves.sum())
    assert ((ends >= mass - slack) & (ends - leaves[found] <= mass + slack)).all()


@settings(max_examples=30, deadline=None)
@given(capacity=CAPACITIES, seed=SEEDS, size=st.integers(1, 70))
def test_draws_are_those_of_the_tree_in_numpy(device: torch.device, capacity: int, seed: int, size: int) -> None:
    rng, tree, plain = np.random.default_rng(seed), DeviceTree(capacity, device), SumTree(capacity)
    index = np.unique(rng.integers(capacity, size=300))
    value = rng.integers(1, 200, size=len(index)).astype(np.float32)  # sums of whole numbers are exact in both
    tree.set(on(device, index), on(device, value))
    plain.set(index, value.astype(np.float64))
    uniform = rng.random(size)
    found, values = tree.draw(on(device, uniform))
    expected, relative = plain.draw(uniform.copy())
    assert found.tolist() == expected.tolist()
    np.testing.assert_allclose((tree.minimum / values).cpu(), relative, rtol=1e-6)


def test_draws_follow_the_values(device: torch.device) -> None:
    tree = DeviceTree(200_000, device)
    index = np.arange(0, 200_000, 20_000) + 63
    value = np.linspace(0.1, 3.0, 10).astype(np.float32)
    tree.set(on(device, index), on(device, value))
    uniform = np.random.default_rng(3).random(20_000)
    found = descend(tree.levels, on(device, uniform))[0].cpu().numpy()
    counts, expected = np.array([(found == i).sum() for i in index]), 20_000 * value / value.sum()
    assert counts.sum() == 20_000
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_9


def test_a_batch_takes_one_index_from_each_equal_part_of_the_total(device: torch.device) -> None:
    tree = DeviceTree(100, device)
    tree.set(torch.arange(64, device=device), torch.ones(64, device=device))
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(20):
        uniform = torch.rand(64, dtype=torch.float64, device=device, generator=generator)
        assert tree.draw(uniform)[0].tolist() == list(range(64))


def test_an_empty_tree_draws_nothing(device: torch.device) -> None:
    tree = DeviceTree(5000, device)
    index, value = tree.draw(torch.rand(7, dtype=torch.float64, device=device))
    assert index.tolist() == [0] * 7
    assert not value.any()
    assert float(tree.minimum) == np.inf


def test_the_spare_leaf_takes_writes_that_change_nothing(device: torch.device) -> None:
    tree = DeviceTree(ARITY, device)
    tree.set(torch.tensor([3, ARITY, ARITY], device=device), torch.tensor([2.0, 0.0, 0.0], device=device))
    assert_whole(tree, np.eye(ARITY, dtype=np.float32)[3] * 2)


def test_trap_7_a_million_writes_leave_no_drift(device: torch.device) -> None:
    rng, tree = np.random.default_rng(0), DeviceTree(20_000, device)
    for scale in np.tile([1e12, 1e-12], 50):
        value = (rng.random(10_000) * scale).astype(np.float32)
        tree.set(on(device, rng.integers(20_000, size=10_000)), on(device, value))
    tree.set(torch.arange(20_000, device=device), torch.zeros(20_000, device=device))
    assert float(tree.total) == 0.0
    tree.set(torch.arange(3, device=device), torch.full((3,), 1e-12, device=device))
    assert float(tree.total) == pytest.approx(3e-12, rel=1e-6)
    assert tree.draw(torch.rand(6, dtype=torch.float64, device=device))[0].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_loaded_tree_is_the_saved_one(device: torch.device) -> None:
    tree, other = DeviceTree(3000, device), DeviceTree(3000, device)
    generator = torch.Generator(device).manual_seed(0)
    for target in (tree, other):
        index = torch.randint(3000, (500,), device=device, generator=generator)
        target.set(index, torch.rand(500, device=device, generator=generator))
    state = tree.state_dict()
    places = [level.data_ptr() for level in other.levels]
    tree.set(torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device))
    other.load_state_dict(state)
    assert [level.data_ptr() for level in other.levels] == places
    other.set(torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device))
    assert torch.equal(tree.sums, other.sums)
    assert torch.equal(tree.mins, other.mins)


@pytest.mark.parametrize("capacity", [1, 64, 2048 * 64 - 1, 2048 * 64, 500_000])
def test_the_bytes_of_a_tree(capacity: int) -> None:
    tree = DeviceTree(capacity, torch.device("cpu"))
    assert tree_bytes(capacity) == tree.sums.nbytes + tree.mins.nbytes
