"""Kernels that read a replay's frames on the device; memory bounds them, so a program has all its reads in flight."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qfleet.accel.kernels.launch import require_dense

THREADS = 128
"""Of one program, at most; each moves 16 bytes of every frame."""


class FrameGrid(NamedTuple):
    """Single frames of a [time, environment] grid, and what places them in episodes; time goes round."""

    frames: Tensor  # [T * E, ...]: row t * E + e
    age: Tensor | None  # [T * E] uint8: steps since the episode's first frame, 255 for more; only stacks ask
    ahead: Tensor  # [T * E] of any dtype: how many steps later the row lies that an item is bootstrapped from
    envs: int


def gather_pairs(
    grid: FrameGrid, rows: Tensor, n_step: int, padding: Literal["zero", "repeat"], out: Tensor, channels_last: bool
) -> Tensor:
    """Write the frame stacks of the items at `rows` [B], and those they bootstrap from, to `out` [2, B, S, ...].

    No item looks further ahead than `n_step`. With `channels_last` (stacks of four, one-byte frames whose size is a
    multiple of 4) `out` is [2, B, ..., S]. `padding` says what stands before an episode's first frame.
    """
    require_dense(grid.frames, grid.ahead, rows, out)
    source = _words(grid.frames, 1)
    capacity, length = source.shape
    block, warps = _program(length)
    places = (source, rows, grid.age, grid.ahead, grid.envs, capacity)
    options = (length, padding == "zero", block)
    launch = (len(rows) * triton.cdiv(length, block),)
    if channels_last:
        if out.shape[-1] != 4 or grid.frames.element_size() != 1 or source.element_size() != 4:
            raise ValueError(f"channels last needs stacks of 4 byte frames of whole words, not {tuple(out.shape)}")
        pixels = out.flatten().view(torch.int32)
        _gather_pairs_last[launch](*places, pixels, len(rows), *options, num_warps=warps)
    else:
        stack = out.shape[2]
        numbers = triton.next_power_of_2(stack + n_step)
        _gather_pairs[launch](*places, _words(out, 3), len(rows), *options, stack, numbers, num_warps=warps)
    return out


def _program(length: int) -> tuple[int, int]:
    """Return how many of `length` entries one program moves, four by a thread, and its warps."""
    block = min(THREADS * 4, triton.next_power_of_2(length))
    return block, max(block // (32 * 4), 1)


def _words(frames: Tensor, leading: int) -> Tensor:
    """Return a view with one last axis of 4-byte words, or of single bytes where frames are no whole words."""
    flat = frames.flatten(leading)
    return flat.view(torch.uint8 if flat.shape[-1] * flat.element_size() % 4 else torch.int32)


@triton.jit
def _gather_pairs(
    frames, rows, ages, aheads, envs, capacity, out, items,
    length: tl.constexpr, zero: tl.constexpr, block: tl.constexpr, stack: tl.constexpr, numbers: tl.constexpr,
):  # fmt: skip
    item, place = _share(length, block)
    place = place[None, :]
    row, age, ahead = _item(rows, ages, aheads, item)
    number = tl.arange(0, numbers)[:, None]  # of the frames from the oldest that is wanted
    second = number - ahead  # its place in the later stack
    in_first, in_second = number < stack, (second >= 0) & (second < stack)
    step = number - (stack - 1)
    wanted = (place < length) & (in_first | in_second)
    entry = _frame(frames, row, step, age, envs, capacity, length, place, wanted, zero)
    tl.store(out + (item * stack + number) * length + place, entry, mask=(place < length) & in_first)
    target = ((items + item) * stack + second) * length + place
    tl.store(out + target, entry, mask=(place < length) & in_second)


@triton.jit
def _gather_pairs_last(
    frames, rows, ages, aheads, envs, capacity, out, items,
    length: tl.constexpr, zero: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    item, place = _share(length, block)
    row, age, ahead = _item(rows, ages, aheads, item)
    first = _stacked(frames, row, 0, age, envs, capacity, length, place, zero)
    second = _stacked(frames, row, ahead, age, envs, capacity, length, place, zero)  # mostly from the cache
    pixel = tl.program_id(0) % tl.cdiv(length, block) * (block * 4) + tl.arange(0, block * 4)
    inside = pixel < length * 4
    tl.store(out + item * (length * 4) + pixel, first, mask=inside)
    tl.store(out + (items + item) * (length * 4) + pixel, second, mask=inside)


@triton.jit
def _share(length: tl.constexpr, block: tl.constexpr):
    """Return this program's item and the places [block] in its frames; neighbours share an item."""
    parts: tl.constexpr = tl.cdiv(length, block)
    item = (tl.program_id(0) // parts).to(tl.int64)  # a million frames are more bytes than 32 bits count
    return item, tl.program_id(0) % parts * block + tl.arange(0, block)


@triton.jit
def _item(rows, ages, aheads, item):
    """Return row, age and steps ahead of an item."""
    row = tl.load(rows + item)
    age = 0
    if ages is not None:
        age = tl.load(ages + row).to(tl.int32)
    return row, age, tl.load(aheads + row).to(tl.int32)


@triton.jit
def _frame(frames, row, step, age, envs, capacity, length: tl.constexpr, place, wanted, zero: tl.constexpr):
    """Return the wanted places of the frame `step` steps from `row`, or what stands before an episode's first."""
    if zero:
        wanted &= step >= -age
    source = row + tl.maximum(step, -age) * envs
    source += tl.where(source < 0, capacity, tl.where(source >= capacity, -capacity, 0))
    return tl.load(frames + source * length + place, mask=wanted, other=0)


@triton.jit
def _stacked(frames, row, newest, age, envs, capacity, length: tl.constexpr, place, zero: tl.constexpr):
    """Return the stacks of four [4 N], a word each, that end `newest` steps from `row`, at the places [N] of words."""
    inside = place < length
    a = _frame(frames, row, newest - 3, age, envs, capacity, length, place, inside, zero)
    b = _frame(frames, row, newest - 2, age, envs, capacity, length, place, inside, zero)
    c = _frame(frames, row, newest - 1, age, envs, capacity, length, place, inside, zero)
    d = _frame(frames, row, newest, age, envs, capacity, length, place, inside, zero)
    return _interleaved(a, b, c, d)


@triton.jit
def _interleaved(a, b, c, d):
    """Return words [4 N] of one byte each of a, b, c, d [N] (four bytes a word), lowest byte first."""
    a, b = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
    c, d = c.to(tl.uint32, bitcast=True), d.to(tl.uint32, bitcast=True)
    ab_even, ab_odd = (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8), ((a >> 8) & 0x00FF00FF) | (b & 0xFF00FF00)
    cd_even, cd_odd = (c & 0x00FF00FF) | ((d & 0x00FF00FF) << 8), ((c >> 8) & 0x00FF00FF) | (d & 0xFF00FF00)
    first, third = (ab_even & 0xFFFF) | (cd_even << 16), (ab_even >> 16) | (cd_even & 0xFFFF0000)
    second, fourth = (ab_odd & 0xFFFF) | (cd_odd << 16), (ab_odd >> 16) | (cd_odd & 0xFFFF0000)
    words = tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(a.shape[0] * 4)
    return words.to(tl.int32, bitcast=True)
