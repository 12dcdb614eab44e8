"""The grid against the naive model, over random episodes that go round its length several times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_grid import Item, NaiveGrid, NaivePriorities, Tick, Ticks
from naive_replay import make_spec

from qfleet.core import codec
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.replay import PrioritisedConfig, UniformConfig
from qfleet.replay.device_priorities import DevicePriorities
from qfleet.replay.grid import Grid, GridSample, grid_bytes, largest_length, row_bytes

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = pytest.param("cuda", marks=GPU)
GAMMA, BETA = 0.9, 0.5
PRIORITISED = PrioritisedConfig(max_decay=0.9)
SAMPLER = {"uniform": UniformConfig(), "prioritised": PRIORITISED}
CHI_SQUARE_49 = 85.35
"""The 99.9 % quantile for 49 degrees of freedom."""

cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "envs": st.integers(1, 5),
        "stack": st.integers(1, 4),
        "padding": st.sampled_from(["zero", "repeat"]),
        "n_step": st.integers(1, 5),
        "masked": st.booleans(),
        "spare": st.integers(0, 12),
        "ticks": st.integers(1, 70),
        "end": st.sampled_from([0.05, 0.25, 0.9]),
    }
)


FULL = {
    "seed": 3, "envs": 3, "stack": 3, "padding": "zero", "n_step": 3, "masked": True, "spare": 14, "end": 0.3
}  # fmt: skip
"""A case of everything, for tests that need only one."""


@pytest.fixture(params=["cpu", CUDA], scope="module")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def build(case: dict[str, Any], sampler: str, device: torch.device) -> tuple[Grid, NaiveGrid, Ticks]:
    spec = make_spec(case["stack"], case["padding"], case["masked"])
    length = case["n_step"] + case["stack"] + case["spare"]
    naive = NaiveGrid(spec, length, case["envs"], case["n_step"], GAMMA)
    return make(naive, sampler, device), naive, Ticks(spec, case["envs"], case["seed"], case["end"])


def make(like: NaiveGrid, sampler: str, device: torch.device) -> Grid:
    generator = torch.Generator(device).manual_seed(7)
    return Grid(like.spec, like.length, like.envs, like.n_step, GAMMA, SAMPLER[sampler], device, generator)


def add(grid: Grid, tick: Tick) -> None:
    grid.add(*tick.tensors(grid.stamp.device))


def assert_same_items(grid: Grid, naive: NaiveGrid) -> None:
    items = naive.items()
    index = [naive.index(item) for item in items]
    assert grid.sampleable.view(-1).nonzero().view(-1).tolist() == sorted(index)
    assert int(grid.count) == len(items)
    if grid.priorities is not None:
        assert grid.priorities.tree.leaves.nonzero().view(-1).tolist() == sorted(index)
    if items:
        rows = torch.tensor(index, device=grid.stamp.device)
        assert_content(grid.transitions(rows, torch.ones(len(rows))), naive, items)


def assert_content(sample: GridSample, naive: NaiveGrid, items: list[Item]) -> None:
    wanted, batch = [naive.content(item) for item in items], sample.batch
    assert sample.generation.tolist() == [tick for tick, _ in items]
    for name, leaves in (("observation", batch.observation), ("next_observation", batch.next_observation)):
        assert list(leaves) == list(naive.spec.observations)
        for leaf, value in leaves.items():
            np.testing.assert_array_equal(value.cpu(), np.stack([w[name][leaf] for w in wanted]))
    assert batch.action.tolist() == [w["action"] for w in wanted]
    np.testing.assert_allclose(batch.reward.cpu(), [w["reward"] for w in wanted], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(batch.discount.cpu(), [w["discount"] for w in wanted], rtol=1e-6)
    for name, mask in (("mask", batch.mask), ("next_mask", batch.next_mask)):
        if naive.spec.masked:
            assert mask is not None
            np.testing.assert_array_equal(mask.cpu(), np.stack([w[name] for w in wanted]))
        else:
            assert mask is None
    assert batch.size == len(items)


def found(sample: GridSample, naive: NaiveGrid) -> list[Item]:
    """The items of a sample, after a look at whether index and generation say the same."""
    items = [(g, i % naive.envs) for i, g in zip(sample.index.tolist(), sample.generation.tolist(), strict=True)]
    assert [naive.index(item) for item in items] == sample.index.tolist()
    return items


@pytest.mark.parametrize("sampler", list(SAMPLER))
@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_same_items_as_the_naive_model(device: torch.device, sampler: str, case: dict[str, Any]) -> None:
    grid, naive, ticks = build(case, sampler, device)
    for number in range(case["ticks"]):
        tick = ticks.tick()
        naive.ticks.append(tick)
        add(grid, tick)
        if number % 4 == case["seed"] % 4:
            assert_same_items(grid, naive)
    assert_same_items(grid, naive)


@pytest.mark.parametrize("sampler", list(SAMPLER))
@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_batches_hold_sampleable_items(device: torch.device, sampler: str, case: dict[str, Any]) -> None:
    grid, naive, ticks = build(case, sampler, device)
    for _ in range(case["ticks"]):
        tick = ticks.tick()
        naive.ticks.append(tick)
        add(grid, tick)
    sample, items = grid.sample(40, BETA), naive.items()
    if not items:
        assert not sample.batch.weight.any()
        return
    drawn = found(sample, naive)
    real = [number for number, item in enumerate(drawn) if item in items]
    assert sample.batch.weight.tolist() == [float(number in real) for number in range(40)]
    assert sampler == "uniform" or len(real) == 40
    rows, weights = sample.index[real], sample.batch.weight[real]
    assert_content(grid.transitions(rows, weights), naive, [drawn[number] for number in real])
    whole = grid.transitions(sample.index, sample.batch.weight).batch
    assert torch.equal(whole.reward, sample.batch.reward)


@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_priorities_and_weights_are_those_of_the_naive_model(device: torch.device, case: dict[str, Any]) -> None:
    grid, naive, ticks = build(case, "prioritised", device)
    expected, rng = NaivePriorities(PRIORITISED), np.random.default_rng(case["seed"])
    held: list[GridSample] = []
    assert grid.priorities is not None
    for _ in range(case["ticks"]):
        tick = ticks.tick()
        naive.ticks.append(tick)
        add(grid, tick)
        expected.follow(naive.items())
        if not expected.given:
            continue
        sample = grid.sample(6, BETA)
        weights = expected.weights(BETA)
        np.testing.assert_allclose(sample.batch.weight.cpu(), [weights[i] for i in found(sample, naive)], rtol=1e-4)
        held.append(sample)
        if rng.random() < 0.6:
            write_back(grid, naive, expected, held, rng)
            unit = float(grid.priorities.unit) or 1.0
            leaves = grid.priorities.tree.leaves.cpu()
            for item in expected.given:
                assert float(leaves[naive.index(item)]) * unit == pytest.approx(expected.value(item), rel=1e-4)
            assert float(grid.priorities.highest) == pytest.approx(expected.highest or 0.0, rel=1e-5)


def write_back(
    grid: Grid, naive: NaiveGrid, expected: NaivePriorities, held: list[GridSample], rng: np.random.Generator
) -> None:
    """Write to items of two earlier samples, some of them gone, some twice, some with nonsense."""
    late = [held[int(rng.integers(len(held)))] for _ in range(2)]
    priority = (rng.random(12) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
    priority[rng.random(12) < 0.1] = np.nan
    priority[rng.random(12) < 0.1] = np.inf
    priority[rng.random(12) < 0.1] = 0.0
    if rng.random() < 0.1:
        priority[:] = np.nan
    index, generation = (torch.cat([getattr(s, name) for s in late]) for name in ("index", "generation"))
    grid.update_priorities(index, generation, torch.from_numpy(priority).to(index.device))
    items = [item for sample in late for item in found(sample, naive)]
    expected.update(list(zip(items, priority.astype(float).tolist(), strict=True)))


@pytest.mark.parametrize("sampler", list(SAMPLER))
@settings(max_examples=12, deadline=None)
@given(case=cases)
def test_a_saved_and_loaded_grid_continues_to_the_bit(device: torch.device, sampler: str, case: dict[str, Any]) -> None:
    first, naive, ticks = build(case, sampler, device)
    for _ in range(case["ticks"]):
        add(first, ticks.tick())
        learn(first)
    second = make(naive, sampler, device)
    for _ in range(9):  # something else is there, which must go
        add(second, Ticks(naive.spec, naive.envs, 0, 0.5).tick())
    places = [tensor.data_ptr() for tensor in (*second.frames.values(), second.fields, second.ticks)]
    second.load_state_dict(codec.roundtrip(first.state_dict()))
    assert [tensor.data_ptr() for tensor in (*second.frames.values(), second.fields, second.ticks)] == places
    for _ in range(20):
        tick = ticks.tick()
        for grid in (first, second):
            add(grid, tick)
        assert int(first.count) == int(second.count)
        for a, b in zip(learn(first), learn(second), strict=True):
            assert torch.equal(a, b)


def learn(grid: Grid) -> list[torch.Tensor]:
    """Draw, write priorities back; return all that was drawn."""
    sample = grid.sample(5, BETA)
    batch = sample.batch
    grid.update_priorities(sample.index, sample.generation, batch.reward.abs())
    masks = [] if batch.mask is None or batch.next_mask is None else [batch.mask, batch.next_mask]
    leaves = [*batch.observation.values(), *batch.next_observation.values(), *masks]
    return [sample.index, sample.generation, batch.weight, batch.action, batch.reward, batch.discount, *leaves]


def test_a_state_is_not_changed_by_what_comes_after(device: torch.device) -> None:
    grid, _, ticks = build(FULL, "prioritised", device)
    for _ in range(9):
        add(grid, ticks.tick())
    state = grid.state_dict()
    before = codec.roundtrip(state)
    for _ in range(40):
        add(grid, ticks.tick())
        learn(grid)
    for name, column in before["columns"].items():
        assert torch.equal(column, state["columns"][name])
    assert torch.equal(before["priorities"]["tree"]["sums"], state["priorities"]["tree"]["sums"])


def test_trap_1_2_4_the_end_of_an_episode_by_hand() -> None:
    spec = EnvSpec(name="line", observations={"x": LeafSpec(shape=(1,), dtype="float32")}, actions=9)
    grid = Grid(spec, 10, 1, 3, 0.5, UniformConfig(), torch.device("cpu"), torch.Generator())
    no, yes = torch.tensor([False]), torch.tensor([True])
    # two episodes: rows 0 and 1, truncated, final row 2; row 3, terminated, final row 4; then row 5 and on
    for x in range(8):
        terminated, final = yes if x == 3 else no, yes if x in (2, 4) else no
        reward = torch.tensor([float(10**x)])
        grid.add({"x": torch.tensor([[float(x)]])}, torch.tensor([x]), reward, terminated, final, None)
    assert grid.sampleable[:, 0].tolist() == [True, True, False, True] + [False] * 6
    batch = grid.transitions(torch.tensor([0, 1, 3]), torch.ones(3)).batch
    assert batch.reward.tolist() == [1 + 0.5 * 10, 10.0, 1000.0]
    assert batch.discount.tolist() == [0.25, 0.5, 0.0]
    assert batch.next_observation["x"].view(-1).tolist() == [2.0, 2.0, 4.0]
    assert batch.action.tolist() == [0, 1, 3]


def test_uniform_draws_are_uniform(device: torch.device) -> None:
    spec = make_spec()
    grid = Grid(spec, 24, 4, 2, GAMMA, UniformConfig(), device, torch.Generator(device).manual_seed(1))
    ticks = Ticks(spec, 4, 1, 0.8)
    for _ in range(50):
        add(grid, ticks.tick())
    items = grid.sampleable.view(-1).nonzero().view(-1)
    assert len(items) == 50  # of 88 complete rows: every second draw meets a final one
    counts = torch.zeros(96)
    for _ in range(40):
        sample = grid.sample(1000, 1.0)
        counts.index_add_(0, sample.index.cpu(), sample.batch.weight.cpu())
    drawn = counts[items.cpu()]
    assert drawn.sum() == counts.sum()
    assert 0.98 * 40_000 < float(drawn.sum()) <= 40_000
    expected = drawn.sum() / 50
    assert float(((drawn - expected) ** 2 / expected).sum()) < CHI_SQUARE_49


def test_nothing_is_written_to_what_is_no_item(device: torch.device) -> None:
    grid, naive, ticks = build(FULL, "prioritised", device)
    for number in range(12):
        sample = grid.sample(4, BETA)
        if number <= naive.n_step:  # nothing is complete yet
            grid.update_priorities(sample.index, sample.generation, torch.ones(4, device=device))
        tick = ticks.tick()
        naive.ticks.append(tick)
        add(grid, tick)
        assert_same_items(grid, naive)


def test_no_priority_takes_an_item_out_or_breaks_the_sum(device: torch.device) -> None:
    priorities = DevicePriorities(PrioritisedConfig(alpha=1.0, epsilon=1e-38), 100, device)
    ones, index = torch.ones(50, device=device), torch.arange(50, device=device)
    priorities.replace_rows(torch.tensor([0, 50], device=device), ones)
    for priority in (ones, torch.where(index % 2 == 0, 0.0, 3e38)):
        priorities.update(index, ones > 0, priority)
    assert (priorities.tree.leaves[:50] > 0).all()
    assert torch.isfinite(priorities.tree.total)
    drawn, weight = priorities.draw(torch.rand(64, dtype=torch.float64, device=device), BETA)
    assert (drawn % 2 == 1).all()
    assert ((weight >= 0) & (weight <= 1)).all()


def test_a_beta_on_the_device_weighs_the_same(device: torch.device) -> None:
    grid, _, ticks = build(FULL, "prioritised", device)
    for _ in range(30):
        add(grid, ticks.tick())
        learn(grid)
    uniform = torch.rand(1, 16, dtype=torch.float64, device=device)
    number = grid.sample_at(uniform, 0.7).batch.weight
    tensor = grid.sample_at(uniform, torch.tensor(0.7, device=device)).batch.weight
    assert len(set(number.tolist())) > 1
    torch.testing.assert_close(number, tensor)


def steps(grid: Grid, tick: tuple[Any, ...], uniform: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All that a loop does with a grid."""
    grid.add(*tick)
    sample = grid.sample_at(uniform, BETA)
    grid.update_priorities(sample.index, sample.generation, sample.batch.reward.abs())
    return sample.index, sample.batch.weight, sample.batch.reward, sample.batch.next_observation["pixels"]


@pytest.mark.parametrize("sampler", list(SAMPLER))
def test_nothing_needs_an_operation_that_cannot_be_repeated(device: torch.device, sampler: str) -> None:
    grid, _, ticks = build(FULL, sampler, device)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(9):
            steps(grid, ticks.tick().tensors(device), torch.rand(8, 6, dtype=torch.float64, device=device))
    finally:
        torch.use_deterministic_algorithms(False)
    assert int(grid.count) > 0


@pytest.mark.parametrize(
    ("backend", "sampler"),
    [
        ("aot_eager", "prioritised"),
        pytest.param("inductor", "prioritised", marks=pytest.mark.slow),
        pytest.param("inductor", "uniform", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_grid_is_the_eager_one(device: torch.device, backend: str, sampler: str) -> None:
    eager, naive, ticks = build(FULL, sampler, device)
    other = make(naive, sampler, device)
    torch._dynamo.reset()
    compiled = torch.compile(steps, backend=backend, fullgraph=True)
    for number in range(45):
        tick = ticks.tick().tensors(device)
        uniform = torch.rand(8, 6, dtype=torch.float64, device=device)
        expected, got = steps(eager, tick, uniform), compiled(other, tick, uniform)
        if number > naive.n_step:
            for a, b in zip(expected, got, strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sampler", list(SAMPLER))
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_grid_is_the_eager_one(sampler: str) -> None:
    device = torch.device("cuda")
    eager, naive, ticks = build(FULL, sampler, device)
    other = make(naive, sampler, device)
    tick, uniform = ticks.tick().tensors(device), torch.rand(8, 6, dtype=torch.float64, device=device)
    for grid in (eager, other):  # what libraries allocate, they allocate now
        steps(grid, tick, uniform)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = steps(other, tick, uniform)
    for number in range(45):
        frames, *rest = ticks.tick().tensors(device)
        for name, frame in frames.items():
            tick[0][name].copy_(frame)
        for static, value in zip(tick[1:], rest, strict=True):
            static.copy_(value)
        uniform.copy_(torch.rand(8, 6, dtype=torch.float64, device=device))
        expected = steps(eager, tick, uniform)
        graph.replay()
        if number > naive.n_step:
            for a, b in zip(expected, got, strict=True):
                assert torch.equal(a, b)


def test_a_grid_too_short_for_one_window_is_refused() -> None:
    spec = make_spec(stack=4)
    with pytest.raises(ConfigError, match=r"raise replay\.capacity to 35"):
        Grid(spec, 6, 5, 3, GAMMA, UniformConfig(), torch.device("cpu"), torch.Generator())


def test_a_state_of_another_layout_is_refused() -> None:
    one, naive, _ = build(FULL, "uniform", torch.device("cpu"))
    with pytest.raises(CheckpointError, match="resume with the settings"):
        make(naive, "prioritised", torch.device("cpu")).load_state_dict(one.state_dict())


@pytest.mark.parametrize("sampler", list(SAMPLER))
@settings(max_examples=20, deadline=None)
@given(case=cases)
def test_the_bytes_of_a_grid_are_known_before_it_is_made(sampler: str, case: dict[str, Any]) -> None:
    grid, naive, _ = build(case, sampler, torch.device("cpu"))
    state = grid.state_dict()
    kept = [*grid._columns().values(), state["window"], state["age"]]
    if grid.priorities is not None:
        kept += [grid.priorities.tree.sums, grid.priorities.tree.mins]
    needed = grid_bytes(naive.spec, naive.length, naive.envs, naive.n_step, SAMPLER[sampler])
    assert sum(tensor.nbytes for tensor in kept) == needed
    arguments = (naive.spec, naive.envs, naive.n_step, SAMPLER[sampler])
    fits = largest_length(*arguments, available=needed)
    assert fits >= naive.length
    assert grid_bytes(naive.spec, fits + 1, naive.envs, naive.n_step, SAMPLER[sampler]) > needed
    assert largest_length(*arguments, available=10) == 0


def test_the_bytes_of_a_row_add_up() -> None:
    spec = make_spec(stack=4, masked=True, frame=(84, 84))
    rows = row_bytes(spec, PRIORITISED)
    assert rows["observation 'pixels'"] == 84 * 84
    whole = grid_bytes(spec, 100_000, 10, 3, PRIORITISED)
    assert sum(rows.values()) * 1_000_000 == pytest.approx(whole, rel=1e-3)
