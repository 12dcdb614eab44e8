"""The grid by kernels against the plain grid, on the same ticks and the same random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from qfleet.accel.cpu_grid import CompiledGrid
from qfleet.accel.kernel_grid import KernelGrid
from qfleet.accel.replay import grid_type
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.replay.grid import Grid, GridSample
from qfleet.replay.samplers import PrioritisedConfig, UniformConfig
from qfleet.replay.sumtree import use_numba

CONFIG = PrioritisedConfig(max_decay=0.9)
GAMMA, ACTIONS = 0.9, 3
cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "envs": st.integers(1, 5),
        "stack": st.sampled_from([1, 2, 4]),
        "padding": st.sampled_from(["zero", "repeat"]),
        "n_step": st.integers(1, 4),
        "masked": st.booleans(),
        "spare": st.integers(0, 9),
        "end": st.sampled_from([0.05, 0.3, 0.9]),
    }
)


def spec_of(case: dict[str, Any]) -> EnvSpec:
    """Frames, a vector, and a number: leaves of whole words, of odd sizes, and without an axis."""
    stack = case["stack"]
    shape = (stack, 3, 5) if stack > 1 else (3, 5)
    leaves = {
        "frames": LeafSpec(shape=shape, dtype="uint8", stack=stack, stack_padding=case["padding"]),
        "vector": LeafSpec(shape=(2,), dtype="float32"),
        "number": LeafSpec(shape=(), dtype="int64", categories=9),
    }
    return EnvSpec(name="mixed", observations=leaves, actions=ACTIONS, masked=case["masked"])


class Pair:
    """Both grids, which get the same ticks."""

    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        self.case, self.device, self.spec = case, device, spec_of(case)
        self.numbers = torch.Generator().manual_seed(case["seed"])
        self.final = torch.zeros(case["envs"], dtype=torch.bool)
        self.plain, self.fast = (self._make(kind) for kind in (Grid, KernelGrid))

    def _make(self, kind: type[Grid]) -> Any:
        length = self.case["n_step"] + self.case["stack"] + self.case["spare"]
        rules = (length, self.case["envs"], self.case["n_step"], GAMMA, CONFIG)
        return kind(self.spec, *rules, self.device, torch.Generator(self.device).manual_seed(7))

    def add(self, ticks: int) -> None:
        for _ in range(ticks):
            columns = self._tick()
            for grid in (self.plain, self.fast):
                grid.add(*columns)

    def _tick(self) -> list[Any]:
        envs, numbers = self.case["envs"], self.numbers
        frames = {
            name: torch.randint(0, 9, (envs, *leaf.frame_shape), generator=numbers).to(getattr(torch, leaf.dtype))
            for name, leaf in self.spec.observations.items()
        }
        terminated, truncated = (torch.rand(2, envs, generator=numbers) < self.case["end"] / 2) & ~self.final
        action, reward = torch.randint(0, ACTIONS, (envs,), generator=numbers), torch.rand(envs, generator=numbers)
        columns = [action, reward, terminated, self.final]
        mask = torch.rand(envs, ACTIONS, generator=numbers) < 0.5 if self.case["masked"] else None
        self.final = terminated | truncated
        placed = [column.to(self.device) for column in columns]
        leaves = {name: frame.to(self.device) for name, frame in frames.items()}
        return [leaves, *placed, None if mask is None else mask.to(self.device)]

    def sample(self, batch: int, beta: Any) -> tuple[GridSample, GridSample]:
        uniform = torch.rand(1, batch, dtype=torch.float64, generator=self.numbers).to(self.device)
        return self.plain.sample_at(uniform, beta), self.fast.sample_at(uniform, beta)


def assert_same_sample(plain: GridSample, fast: GridSample) -> None:
    assert torch.equal(plain.index, fast.index)
    assert torch.equal(plain.generation, fast.generation)
    for name, expected in vars(plain.batch).items():
        actual = getattr(fast.batch, name)
        if isinstance(expected, dict):
            assert list(actual) == list(expected)
            for leaf, value in expected.items():
                assert actual[leaf].dtype == value.dtype
                assert torch.equal(actual[leaf], value), leaf
        elif name == "weight":
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0.0)
        elif isinstance(expected, torch.Tensor):
            assert torch.equal(actual, expected), name
        else:
            assert actual == expected


def assert_same_priorities(pair: Pair) -> None:
    plain, fast = pair.plain.priorities, pair.fast.priorities
    torch.testing.assert_close(fast.tree.sums, plain.tree.sums, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(fast.tree.mins, plain.tree.mins, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(fast._scalars, plain._scalars, rtol=1e-5, atol=0.0)


@settings(max_examples=5, deadline=None)
@given(case=cases)
def test_same_batches_and_priorities_as_the_plain_grid(device: torch.device, case: dict[str, Any]) -> None:
    pair = Pair(case, device)
    for ticks in (1, 6, 5):
        pair.add(ticks)
        assert_same_priorities(pair)
        for beta in (0.4, torch.tensor(0.7, device=device)):
            drawn, fast = pair.sample(5, beta)
            assert_same_sample(drawn, fast)
        pair.add(2)  # some of the drawn rows are stale by now
        priority = torch.rand(5, generator=pair.numbers).to(device)
        priority[1] = float("nan")
        for grid in (pair.plain, pair.fast):
            grid.update_priorities(drawn.index, drawn.generation, priority)
        assert_same_priorities(pair)


FULL = {"seed": 3, "envs": 3, "stack": 4, "padding": "zero", "n_step": 3, "masked": True, "spare": 14, "end": 0.2}


def test_a_batch_of_many_items_writes_by_several_launches(device: torch.device) -> None:
    pair = Pair({**FULL, "envs": 5}, device)
    pair.add(30)
    drawn = pair.plain.sample(130, 0.5)
    priority = torch.rand(130, generator=pair.numbers).to(device)
    for grid in (pair.plain, pair.fast):
        grid.update_priorities(drawn.index, drawn.generation, priority)
    assert_same_priorities(pair)


def test_a_draw_is_not_overwritten_by_the_next(device: torch.device) -> None:
    pair = Pair(FULL, device)
    pair.add(25)
    first = pair.fast.sample(4, 0.5)
    kept = first.batch.observation["frames"].clone()
    second = pair.fast.sample(4, 0.5)
    assert torch.equal(first.batch.observation["frames"], kept)
    assert not torch.equal(second.index, first.index)


def test_each_continues_from_the_state_of_the_other(device: torch.device) -> None:
    pair, other = Pair(FULL, device), Pair(FULL, device)
    pair.add(25)
    other.fast.load_state_dict(pair.plain.state_dict())
    other.plain.load_state_dict(pair.fast.state_dict())
    assert_same_priorities(other)
    assert_same_sample(*other.sample(6, 0.5))
    assert_same_sample(pair.plain.sample(6, 0.5), other.fast.sample(6, 0.5))


@pytest.mark.parametrize("sampler", [UniformConfig(), CONFIG])
@pytest.mark.parametrize("kernels", [False, True])
def test_kernels_are_taken_where_they_can_run_and_pay(device: torch.device, sampler: Any, kernels: bool) -> None:
    if device.type == "cuda":
        wanted: type[Grid] = KernelGrid if kernels and sampler is CONFIG else Grid
    else:
        wanted = CompiledGrid if kernels and use_numba() else Grid
    assert grid_type(sampler, device, kernels) is wanted
