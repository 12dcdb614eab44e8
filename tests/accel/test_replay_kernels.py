"""The kernels that read frames against plain indexing, to the byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compile_for_hopper import compile_for_hopper
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from qfleet.accel.kernels.launch import available
from qfleet.accel.kernels.replay import FrameGrid, gather_pairs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW = settings(max_examples=20, deadline=None)


def random_frames(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "uint8") -> Tensor:
    return torch.from_numpy(rng.integers(0, 256, shape).astype(dtype)).to(DEVICE)


def junk(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """What an `out` holds before: something that no test expects there."""
    return torch.full(shape, 77, dtype=dtype, device=DEVICE)


def expected_pairs(grid: FrameGrid, rows: Tensor, stack: int, padding: str) -> Tensor:
    """The definition: each stack frame by frame, [2, B, S, ...]."""
    shape = grid.frames.shape[1:]
    stacks = torch.zeros(2, len(rows), stack, *shape, dtype=grid.frames.dtype, device=DEVICE)
    for item, row in enumerate(rows.tolist()):
        age, ahead = int(grid.age[row]), int(grid.ahead[row])
        for second in range(2):
            for slot in range(stack):
                step = second * ahead - (stack - 1 - slot)
                if step >= -age or padding == "repeat":
                    source = (row + max(step, -age) * grid.envs) % len(grid.frames)
                    stacks[second, item, slot] = grid.frames[source]
    return stacks


def random_grid(rng: np.random.Generator, shape: tuple[int, ...], n_step: int, dtype: str = "uint8") -> FrameGrid:
    envs = int(rng.integers(1, 5))
    rows = envs * int(rng.integers(10, 15))
    age, ahead = rng.choice([0, 1, 2, 3, 4, 9, 255], rows), rng.integers(1, n_step + 1, rows)
    columns = [torch.from_numpy(column.astype(np.uint8)).to(DEVICE) for column in (age, ahead)]
    return FrameGrid(random_frames(rng, (rows, *shape), dtype), *columns, envs)


def random_rows(rng: np.random.Generator, count: int, size: int) -> Tensor:
    """Rows with both ends of the ring among them."""
    rows = rng.integers(0, count, size)
    rows[0], rows[-1] = 0, count - 1
    return torch.from_numpy(rows).to(DEVICE)


def test_the_kernels_can_run_here():
    assert available()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="needs memory that is not there until it is written")
def test_rows_beyond_two_gigabytes_are_found():
    length, count = 1001, 2_200_000
    memory = np.zeros((count, length), np.uint8)
    last = memory[-8:] = np.random.default_rng(2).integers(0, 256, (8, length))
    frames = torch.from_numpy(memory)
    rows = torch.tensor([count - 8])
    age, ahead = torch.zeros(count, dtype=torch.uint8), torch.ones(count, dtype=torch.uint8)
    out = gather_pairs(FrameGrid(frames, age, ahead, 1), rows, 1, "zero", junk(2, 1, 1, length), False)
    assert np.array_equal(out.numpy()[:, 0, 0], last[:2])


@FEW
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(["zero", "repeat"]),
    st.sampled_from([(1,), (3, 3), (6, 10), (530,)]),
)
def test_pairs_of_stacks_are_gathered(seed, stack, n_step, padding, shape):
    rng = np.random.default_rng(seed)
    grid = random_grid(rng, shape, n_step)
    rows = random_rows(rng, len(grid.frames), 3)
    out = gather_pairs(grid, rows, n_step, padding, junk(2, 3, stack, *shape), channels_last=False)
    assert torch.equal(out, expected_pairs(grid, rows, stack, padding))


@FEW
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from(["zero", "repeat"]), st.sampled_from([4, 60, 2120])
)
def test_pairs_of_stacks_are_gathered_with_channels_last(seed, n_step, padding, pixels):
    rng = np.random.default_rng(seed)
    grid = random_grid(rng, (2, pixels // 2), n_step)
    rows = random_rows(rng, len(grid.frames), 3)
    out = gather_pairs(grid, rows, n_step, padding, junk(2, 3, 2, pixels // 2, 4), channels_last=True)
    assert torch.equal(out.permute(0, 1, 4, 2, 3), expected_pairs(grid, rows, 4, padding))


def test_pairs_of_single_float_frames_need_no_age():
    rng = np.random.default_rng(3)
    grid = random_grid(rng, (5,), 2, "float32")._replace(age=None)
    rows = random_rows(rng, len(grid.frames), 4)
    out = gather_pairs(grid, rows, 2, "repeat", junk(2, 4, 1, 5, dtype=torch.float32), channels_last=False)
    later = (rows + grid.ahead[rows].long() * grid.envs) % len(grid.frames)
    assert torch.equal(out[:, :, 0], torch.stack((grid.frames[rows], grid.frames[later])))


@pytest.mark.parametrize(("stack", "shape", "dtype"), [(3, (4,), "uint8"), (4, (3, 3), "uint8"), (4, (4,), "float32")])
def test_what_channels_last_cannot_do_is_refused(stack, shape, dtype):
    grid = random_grid(np.random.default_rng(4), shape, 1, dtype)
    rows = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="channels last"):
        gather_pairs(grid, rows, 1, "zero", junk(2, 2, *shape, stack, dtype=grid.frames.dtype), channels_last=True)


def test_tensors_with_gaps_are_refused():
    grid = random_grid(np.random.default_rng(4), (4,), 1)
    rows = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="contiguous"):
        gather_pairs(grid, rows, 1, "zero", junk(2, 2, 4, 3).transpose(2, 3), channels_last=False)


def every_launch() -> None:
    """Call each kernel as the benchmark does, and with sizes of 1, for which the compiler makes other code."""
    for envs, size in ((16, 32), (1, 1)):
        grid = FrameGrid(torch.zeros(64, 84, 84, dtype=torch.uint8), *torch.ones(2, 64, dtype=torch.uint8), envs)
        items = torch.zeros(size, dtype=torch.int64)
        gather_pairs(grid, items, 1, "zero", torch.zeros(2, size, 4, 84, 84, dtype=torch.uint8), False)
        gather_pairs(grid, items, 3, "repeat", torch.zeros(2, size, 84, 84, 4, dtype=torch.uint8), True)


def test_an_h200_gets_wide_reads_and_writes(tmp_path):
    code = compile_for_hopper("test_replay_kernels", tmp_path)
    assert len(code) == 4
    for kernel in code:
        assert "ld.global.v4.b32" in kernel
        assert "st.global.v4.b32" in kernel
