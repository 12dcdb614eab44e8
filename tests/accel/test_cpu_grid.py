"""The grid with compiled loops against the plain grid, on the same ticks and the same random numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from qfleet.accel.cpu_grid import CompiledGrid
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.replay.grid import Grid, split_sample
from qfleet.replay.samplers import PrioritisedConfig, UniformConfig

CPU = torch.device("cpu")
SAMPLERS = {"uniform": UniformConfig(), "prioritised": PrioritisedConfig(max_decay=0.9)}
cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "envs": st.integers(1, 5),
        "stack": st.sampled_from([1, 3]),
        "n_step": st.integers(1, 5),
        "masked": st.booleans(),
        "spare": st.integers(0, 9),
        "end": st.sampled_from([0.05, 0.3, 0.9]),
        "ticks": st.integers(1, 50),
    }
)


def spec_of(case):
    stack = case["stack"]
    leaves = {
        "camera": LeafSpec(shape=(stack, 3, 2) if stack > 1 else (3, 2), dtype="uint8", stack=stack),
        "speed": LeafSpec(shape=(2,), dtype="float32"),
    }
    return EnvSpec(name="mixed", observations=leaves, actions=4, masked=case["masked"])


def grids(case, sampler):
    spec, length = spec_of(case), case["n_step"] + case["stack"] + case["spare"]
    return [
        kind(spec, length, case["envs"], case["n_step"], 0.9, SAMPLERS[sampler], CPU, torch.Generator().manual_seed(7))
        for kind in (CompiledGrid, Grid)
    ]


def ticks(case):
    """Yield what `add` takes, with a final row after each end."""
    rng, envs, spec = np.random.default_rng(case["seed"]), case["envs"], spec_of(case)
    ended = np.zeros(envs, np.bool_)
    for _ in range(case["ticks"]):
        frames = {
            "camera": torch.from_numpy(rng.integers(256, size=(envs, 3, 2)).astype(np.uint8)),
            "speed": torch.from_numpy(rng.standard_normal((envs, 2)).astype(np.float32)),
        }
        frames["camera"] = frames["camera"].view(envs, *spec.observations["camera"].frame_shape)
        final, over = ended, (rng.random(envs) < case["end"])
        ended = over & ~final
        terminated = ended & (rng.random(envs) < 0.6)
        mask = torch.from_numpy(rng.random((envs, 4)) < 0.7) if case["masked"] else None
        lines = rng.integers(4, size=envs), rng.standard_normal(envs).astype(np.float32), terminated, final
        yield frames, *map(torch.from_numpy, lines), mask


def assert_same(found, expected):
    for one, other in ((found, expected), (found.batch, expected.batch)):
        for field in dataclasses.fields(one):
            if field.name != "batch":
                torch.testing.assert_close(getattr(one, field.name), getattr(other, field.name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_the_same_ticks_give_the_same_batches(sampler, case):
    ours, plain = grids(case, sampler)
    rng = np.random.default_rng(case["seed"])
    for tick in ticks(case):
        for grid in (ours, plain):
            grid.add(*tick)
        torch.testing.assert_close(ours.fields, plain.fields, rtol=1e-6, atol=1e-6)
        assert torch.equal(ours.sampleable, plain.sampleable)
        found, expected = (grid.sample(6, 0.5) for grid in (ours, plain))
        assert_same(found, expected)
        priority = torch.from_numpy(rng.random(6).astype(np.float32))
        for grid, sample in ((ours, found), (plain, expected)):
            grid.update_priorities(sample.index, sample.generation, priority)


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@settings(max_examples=10, deadline=None)
@given(case=cases)
def test_a_saved_grid_continues_to_the_bit_and_in_the_plain_one(sampler, case):
    ours, plain = grids(case, sampler)
    again = grids(case, sampler)[0]
    *before, last = ticks(case)
    for tick in before:
        ours.add(*tick)
    state = ours.state_dict()
    for grid in (again, plain):
        grid.load_state_dict(state)
    for grid in (ours, again, plain):
        grid.add(*last)
    whole, cut, other = (grid.sample(5, 0.5) for grid in (ours, again, plain))
    assert_same(whole, other)
    for field in ("reward", "discount", "weight", "action"):
        assert torch.equal(getattr(whole.batch, field), getattr(cut.batch, field))


@pytest.mark.parametrize("masked", [False, True])
def test_a_split_sample_is_the_same_items(masked):
    case = {"seed": 1, "envs": 3, "stack": 3, "n_step": 2, "masked": masked, "spare": 9, "end": 0.2, "ticks": 40}
    grid = grids(case, "uniform")[0]
    for tick in ticks(case):
        grid.add(*tick)
    whole = grid.sample(12, 1.0)
    parts = split_sample(whole, 4)
    assert len(parts) == 4
    for number, part in enumerate(parts):
        rows = slice(3 * number, 3 * number + 3)
        expected = grid.transitions(whole.index[rows], whole.batch.weight[rows])
        assert part.batch.size == 3
        assert_same(part, expected)
