"""The distributions that samplers draw from, the trees themselves, and exact importance weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_replay import History, make_spec

from qfleet.core.types import Floats, Ints, Priorities
from qfleet.replay import PrioritisedConfig, Replay, ReplayConfig, compiled
from qfleet.replay.compiled import CompiledRecords, CompiledSumTree
from qfleet.replay.records import WORDS, Records
from qfleet.replay.samplers import PrioritisedSampler, Sampler, UniformSampler
from qfleet.replay.segments import Chains
from qfleet.replay.sumtree import SumTree, make_sum_tree

TREES = [SumTree, CompiledSumTree]
# the 99.9 % quantile of chi-square for a few degrees of freedom, so that no statistics package is needed
CHI_SQUARE = {9: 27.88, 49: 85.35}


def chi_square(counts: Ints, probabilities: np.typing.NDArray[np.float64]) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def frequencies(sampler: Sampler, rows: Ints, draws: int) -> Ints:
    drawn = np.concatenate([sampler.draw(100, 0.4)[0] for _ in range(draws // 100)])
    assert np.isin(drawn, rows).all()
    return np.array([(drawn == row).sum() for row in rows])


@pytest.mark.parametrize("capacity", [60, 1000])  # rejection, and the explicit list for few among many
def test_uniform_draws_are_uniform(capacity: int) -> None:
    sampler = UniformSampler(capacity, np.random.default_rng(5))
    rows = np.sort(np.random.default_rng(6).permutation(capacity)[:50])
    sampler.add(rows)
    sampler.add(np.setdiff1d([0, capacity - 1], rows))
    sampler.remove(np.setdiff1d([0, capacity - 1], rows))
    assert chi_square(frequencies(sampler, rows, 40_000), np.full(50, 1 / 50)) < CHI_SQUARE[49]


@pytest.mark.parametrize("no_numba", ["0", "1"])
def test_prioritised_draws_follow_the_priorities(no_numba: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLEET_NO_NUMBA", no_numba)
    sampler = PrioritisedSampler(PrioritisedConfig(alpha=0.7, epsilon=1e-6), 5000, np.random.default_rng(5))
    rows = np.arange(10) * 487
    priorities = np.linspace(0.1, 3.0, 10).astype(np.float32)
    sampler.add(rows)
    sampler.update(rows, priorities, float(priorities.max()))
    expected = (priorities.astype(np.float64) + 1e-6) ** 0.7
    # strata of one draw: the strata of a batch are not independent and would make the statistic too small
    drawn = np.array([sampler.draw(1, 0.4)[0][0] for _ in range(20_000)])
    counts = np.array([(drawn == row).sum() for row in rows])
    assert chi_square(counts, expected / expected.sum()) < CHI_SQUARE[9]


def test_a_batch_takes_one_item_from_each_equal_part_of_the_total() -> None:
    sampler = PrioritisedSampler(PrioritisedConfig(), 100, np.random.default_rng(5))
    sampler.add(np.arange(64))
    for _ in range(20):
        assert sampler.draw(64, 0.4)[0].tolist() == list(range(64))


def test_importance_weights_are_exact() -> None:
    sampler = PrioritisedSampler(PrioritisedConfig(alpha=0.6), 3000, np.random.default_rng(5))
    rows = np.arange(0, 3000, 3)
    sampler.add(rows)
    priorities: Floats = np.random.default_rng(1).random(len(rows)).astype(np.float32) * 5
    sampler.update(rows, priorities, float(priorities.max()))
    probability = sampler.tree.leaves / sampler.tree.leaves.sum()
    with np.errstate(divide="ignore"):
        weight = (len(rows) * probability) ** -0.4
    drawn, weights = sampler.draw(256, 0.4)
    np.testing.assert_allclose(weights, weight[drawn] / weight[rows].max(), rtol=1e-6)


@pytest.mark.parametrize("tree_type", TREES)
@settings(max_examples=40, deadline=None)
@given(
    capacity=st.sampled_from([1, 31, 32, 33, 1500, 40_000]),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([1.0, 1e-3, 1e6]),
)
def test_a_tree_is_its_leaves(tree_type: type[SumTree], capacity: int, seed: int, spread: float) -> None:
    rng, tree, leaves = np.random.default_rng(seed), tree_type(capacity), np.zeros(capacity)
    for _ in range(8):
        index = rng.integers(capacity, size=rng.integers(1, 80))
        value = rng.random(len(index)) ** 8 * spread * (rng.random(len(index)) < 0.7)
        tree.set(index, value)
        for i, v in zip(index, value, strict=True):
            leaves[i] = v
    np.testing.assert_array_equal(tree.leaves, leaves)
    assert tree.total == pytest.approx(leaves.sum())
    positive = leaves[leaves > 0]
    assert tree.minimum == (positive.min() if len(positive) else np.inf)
    if len(positive):
        mass = np.sort(rng.random(50)) * tree.total
        mass[-1] = np.nextafter(tree.total, 0)
        found = tree.find(mass)
        assert (leaves[found] > 0).all()
        ends = np.cumsum(leaves)
        slack = 1e-9 * tree.total
        assert ((ends[found] >= mass - slack) & (ends[found] - leaves[found] <= mass + slack)).all()


@settings(max_examples=40, deadline=None)
@given(capacity=st.sampled_from([5, 1500, 40_000]), seed=st.integers(0, 2**32 - 1), size=st.integers(1, 70))
def test_compiled_and_numpy_trees_draw_the_same(capacity: int, seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    plain, fast = SumTree(capacity), CompiledSumTree(capacity)
    for _ in range(5):
        index, value = rng.integers(capacity, size=60), rng.random(60) ** 6
        uniform = rng.random(size)
        for tree in (plain, fast):
            tree.set(index, value)
        assert plain.leaves.tobytes() == fast.leaves.tobytes()
        assert plain.minimum == fast.minimum
        # a mass on the border between two leaves may go to either: sums are rounded in another order
        for a, b in zip(plain.draw(uniform.copy()), fast.draw(uniform.copy()), strict=True):
            np.testing.assert_array_equal(a, b)
        assert plain.total == pytest.approx(fast.total, rel=1e-13)


@settings(max_examples=30, deadline=None)
@given(capacity=st.sampled_from([6, 1500, 40_000]), seed=st.integers(0, 2**32 - 1), size=st.integers(1, 70))
def test_compiled_and_numpy_records_are_the_same(capacity: int, seed: int, size: int) -> None:
    rng, segment = np.random.default_rng(seed), capacity // 3
    chains = Chains(3, segment, 1, lambda _: None)
    chains.generation[:] = rng.integers(9, size=3)
    words = rng.integers(2**30, size=(3 * segment, WORDS)).astype(np.int32)
    trees = SumTree(3 * segment), CompiledSumTree(3 * segment)
    value, uniform = rng.random(3 * segment), rng.random(size)
    for tree in trees:
        tree.set(np.arange(3 * segment), value)
    plain, fast = Records(words, chains), CompiledRecords(words, chains)
    for a, b in zip(plain.draw(trees[0], uniform.copy()), fast.draw(trees[1], uniform.copy()), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = rng.integers(3 * segment, size=size)
    for a, b in zip(plain.read(rows), fast.read(rows), strict=True):
        np.testing.assert_array_equal(a, b)
    for stale in (0, 1):
        stamp = chains.generation[rows // segment] + stale
        written = Priorities(rows, stamp, rng.random(size, np.float32))
        np.testing.assert_equal(plain.highest(written), fast.highest(written))


@pytest.mark.parametrize("tree_type", TREES)
@settings(max_examples=40, deadline=None)
@given(capacity=st.sampled_from([5, 1500, 40_000]), seed=st.integers(0, 2**32 - 1))
def test_the_minimum_survives_ties_removals_and_being_overwritten(
    tree_type: type[SumTree], capacity: int, seed: int
) -> None:
    rng, tree, leaves = np.random.default_rng(seed), tree_type(capacity), np.zeros(capacity)
    for _ in range(30):
        index = np.unique(rng.integers(capacity, size=rng.integers(1, 50)))
        if rng.random() < 0.3 and leaves.any():  # take the smallest away
            index = np.flatnonzero(leaves == leaves[leaves > 0].min())
        leaves[index] = rng.integers(0, 6, size=len(index)) * rng.choice([1.0, 0.5])
        tree.set(index, leaves[index])
        if rng.random() < 0.5:  # not each time, so that changes gather unseen
            assert tree.minimum == leaves[leaves > 0].min(initial=np.inf)


def test_trap_7_a_million_writes_leave_no_drift() -> None:
    rng, tree = np.random.default_rng(0), make_sum_tree(2000)
    for scale in np.tile([1e12, 1e-12], 250):
        tree.set(rng.integers(2000, size=2000), rng.random(2000) * scale)
    tree.set(np.arange(2000), np.zeros(2000))
    assert tree.total == 0.0
    tree.set(np.arange(3), np.full(3, 1e-12))
    assert tree.total == pytest.approx(3e-12, rel=1e-12)


def test_the_fallback_is_forced_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLEET_NO_NUMBA", "1")
    assert type(make_sum_tree(10)) is SumTree
    monkeypatch.delenv("QFLEET_NO_NUMBA")
    assert type(make_sum_tree(10)) is CompiledSumTree


def test_uniform_sampling_needs_nothing_compiled() -> None:
    code = (
        "import sys; import numpy as np; from naive_replay import make_spec\n"
        "from qfleet.replay import Replay, ReplayConfig\n"
        "Replay(ReplayConfig(capacity=100), make_spec(), streams=1, n_step=1, gamma=1, rng=np.random.default_rng(0))\n"
        "assert 'numba' not in sys.modules, 'numba takes a second to load'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_everything_compiled_is_ready_before_the_first_sample() -> None:
    kernels = (compiled._set, compiled._draw, compiled._draw_leaves, compiled._read, compiled._highest)
    spec, config = make_spec(), ReplayConfig(capacity=100, sampler=PrioritisedConfig())
    replay = Replay(config, spec, streams=4, n_step=1, gamma=0.9, rng=np.random.default_rng(0))
    ready = [len(kernel.signatures) for kernel in kernels]
    assert min(ready) > 0
    assert len(replay) == 0
    history = History(spec, 2, seed=0)
    while len(replay) < 10:
        replay.append(history.message())
    batch = replay.sample(8)
    replay.update_priorities(Priorities(batch.index, batch.generation, np.ones(8, np.float32)))
    assert [len(kernel.signatures) for kernel in kernels] == ready
