"""Brings flat float32 weights into the layout of the matrix products, and their gradients back, in one launch each.

A packed layer holds, for each output, its weights as (pixel, channel); the network has them as (channel, pixel). Small
layers go entry by entry through a table of places. The dense layer, whose weights are nearly all there are, goes by
tiles that are turned within a program, so that memory is read and written in order on both sides.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Entries of the small layers that one program adds up; each block belongs to one layer."""
_COPIED = 1024
"""Entries of the small layers that one program copies."""
_TOGETHER = 64
"""Partial sums that are read before the first is added, at most."""


@dataclass(frozen=True)
class Turned:
    """The dense layer: where its weights [outputs, channels * pixels] begin in the flat tensor."""

    start: int
    outputs: int
    channels: int
    pixels: int

    @property
    def tile_pixels(self) -> int:
        """Pixels of the tile in which a program turns the weights of one output: a power of two."""
        return int(triton.next_power_of_2(self.pixels))

    @property
    def warps(self) -> int:
        """Warps of such a program: each thread has 32 entries of the tile, or fewer of a small one."""
        return min(max(self.channels * self.tile_pixels // 1024, 4), 32)


def pack(networks: Sequence[Tensor], places: Tensor, dense: Turned, out: Tensor) -> None:
    """Write one or two networks' flat weights [P] to `out` [networks, S + dense weights], in its type.

    Entry i of the small layers comes from `places[i]` ([S] int32).
    """
    small = len(places)
    _pack_kernel[(triton.cdiv(small, _COPIED) + dense.outputs, len(networks))](
        networks[0], networks[-1], places, out, small, dense.start, out.stride(0),
        channels=dense.channels, pixels=dense.pixels, tile_pixels=dense.tile_pixels, block=_COPIED,
        num_warps=dense.warps,
    )  # fmt: skip


def fold(
    partials: Tensor, parts: Tensor, most: int, places: Tensor, turned: Tensor, dense: Turned, gradients: Tensor
) -> None:
    """Add partial sums in a fixed order and write them to the flat gradients [P].

    Block i of `places` (int32, -1 for none) is the sum of `parts[i] = (start, step, count)` blocks of `partials`, which
    lie `step` apart; no count is above `most`. `turned` [outputs, pixels * channels] is the dense weights' gradient.
    """
    blocks = len(parts)
    _fold_kernel[(blocks + dense.outputs,)](
        partials, parts, places, turned, gradients, blocks, dense.start,
        channels=dense.channels, pixels=dense.pixels, tile_pixels=dense.tile_pixels,
        block=BLOCK, most=most, together=min(_TOGETHER, triton.next_power_of_2(most)), num_warps=dense.warps,
    )  # fmt: skip


@triton.jit
def _pack_kernel(
    first, second, places, out, small, dense_start, network_step,
    channels: tl.constexpr, pixels: tl.constexpr, tile_pixels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program, network = tl.program_id(0), tl.program_id(1)
    out += network * network_step
    blocks = tl.cdiv(small, block)
    if program < blocks:
        _pack_block(first, second, places, out, network, program * block, small, block)
    else:
        start = (program - blocks) * (channels * pixels)
        flat = dense_start + start
        _pack_row(first + flat, second + flat, out + small + start, network, channels, pixels, tile_pixels)


@triton.jit
def _pack_block(first, second, places, out, network, start, small, block: tl.constexpr):
    entry = start + tl.arange(0, block)
    mask = entry < small
    place = tl.load(places + entry, mask=mask, other=0)
    value = either(first, second, place, network, mask)
    tl.store(out + entry, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _pack_row(
    first, second, out, network, channels: tl.constexpr, pixels: tl.constexpr, tile_pixels: tl.constexpr
):  # fmt: skip
    """Turn the weights (channel, pixel) of one output."""
    channel, pixel = tl.arange(0, channels), tl.arange(0, tile_pixels)
    mask = pixel < pixels
    value = either(first, second, channel[:, None] * pixels + pixel[None, :], network, mask[None, :])
    value = tl.trans(value).to(out.dtype.element_ty)
    tl.store(out + pixel[:, None] * channels + channel[None, :], value, mask=mask[:, None])


@triton.jit
def either(first, second, place, network, mask):
    """Return entries of the first tensor for network 0, of the second for network 1; the other one is not read."""
    value = tl.load(first + place, mask=mask & (network == 0), other=0.0)
    return value + tl.load(second + place, mask=mask & (network == 1), other=0.0)


@triton.jit
def _fold_kernel(
    partials, parts, places, turned, gradients, blocks, dense_start,
    channels: tl.constexpr, pixels: tl.constexpr, tile_pixels: tl.constexpr,
    block: tl.constexpr, most: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < blocks:
        _fold_block(partials, parts + program * 3, places + program * block, gradients, block, most, together)
    else:
        start = (program - blocks) * (channels * pixels)
        _fold_row(turned + start, gradients + dense_start + start, channels, pixels, tile_pixels)


@triton.jit
def _fold_block(partials, part, places, gradients, block: tl.constexpr, most: tl.constexpr, together: tl.constexpr):
    entry = tl.arange(0, block)
    start, step, count = tl.load(part), tl.load(part + 1), tl.load(part + 2)
    place = tl.load(places + entry)
    total = tl.zeros((block,), tl.float32)
    for first in range(0, most, together):
        split = first + tl.arange(0, together)
        mask = (split < count)[:, None] & (place >= 0)[None, :]
        value = tl.load(partials + start + split[:, None] * step + entry[None, :], mask=mask, other=0.0)
        total += tl.sum(value, axis=0)
    tl.store(gradients + place, total, mask=place >= 0)


@triton.jit
def _fold_row(turned, gradients, channels: tl.constexpr, pixels: tl.constexpr, tile_pixels: tl.constexpr):
    """Turn the gradient (pixel, channel) of one output's weights."""
    channel, pixel = tl.arange(0, channels), tl.arange(0, tile_pixels)
    mask = pixel < pixels
    value = tl.load(turned + pixel[:, None] * channels + channel[None, :], mask=mask[:, None], other=0.0)
    tl.store(gradients + channel[:, None] * pixels + pixel[None, :], tl.trans(value), mask=mask[None, :])
