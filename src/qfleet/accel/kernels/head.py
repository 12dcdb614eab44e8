"""The last dense layer of a network that predicts one value per action, with the end of the layer before it.

All kernels work in float32 on the network's own weights: the layer is small, and its values choose actions. Where the
tensor cores multiply, it is three times with 10 bits each, which is as exact.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from qfleet.accel.kernels.packing import either

_COLUMNS = 64
"""Hidden units that a program with several images handles at a time."""
_ROWS = 16
"""Images in one program, where there are several: the least that tensor cores multiply."""


class Dense(NamedTuple):
    """What the head needs of one network: the hidden layer's bias [H], and weight [A, H] and bias [A] of the last."""

    hidden_bias: Tensor
    weight: Tensor
    bias: Tensor


def head_forward(
    parts: Tensor, online_rows: int, online: Dense, target: Dense, hidden: Tensor, q: Tensor, together: bool
) -> None:
    """Finish the hidden layer and write the values `q` [I, A]; the first `online_rows` are the online network's.

    `parts` [splits, I, H] are sums that lack the bias and the ReLU. The first images' results, as many as `hidden`
    [B, H] has rows, are kept for the backward pass. A program handles one image, or several `together`.
    """
    images, actions = q.shape
    width = hidden.shape[1]
    tensors = (parts, *online, *target, hidden, q)
    if together:
        online_tiles = triton.cdiv(online_rows, _ROWS)
        tiles = online_tiles + triton.cdiv(images - online_rows, _ROWS)
        _several_kernel[(tiles,)](
            *tensors, images, online_rows, online_tiles, len(hidden), actions,
            splits=len(parts), width=width, rows=_ROWS, tile_actions=_tile_actions(actions), columns=_COLUMNS,
        )  # fmt: skip
    else:
        _single_kernel[(images,)](
            *tensors, images, online_rows, len(hidden), actions,
            splits=len(parts), width=width, tile_actions=_tile_actions(actions), columns=math.gcd(width, 512),
            num_warps=8,
        )  # fmt: skip


def head_backward(
    upstream: Tensor, hidden: Tensor, weight: Tensor, hidden_slope: Tensor, weight_out: Tensor, bias_out: Tensor
) -> None:
    """Write the gradient [B, H] of the hidden layer before its ReLU, and partial sums of the last layer's gradients.

    `upstream` [B, A] is the gradient of the values; `weight_out` [splits, A, H] and `bias_out` [splits, A] are float32.
    """
    batch, actions = upstream.shape
    width, splits = hidden.shape[1], len(weight_out)
    _backward_kernel[(width // _COLUMNS, splits)](
        upstream, hidden, weight, hidden_slope, weight_out, bias_out,
        batch, actions, weight_out.stride(0), bias_out.stride(0),
        width=width, share=triton.cdiv(batch, splits),
        rows=_ROWS, tile_actions=_tile_actions(actions), columns=_COLUMNS,
    )  # fmt: skip


def _tile_actions(actions: int) -> int:
    """Return the actions of a tile: a power of two, and enough for a matrix product."""
    return max(16, int(triton.next_power_of_2(actions)))


@triton.jit
def _single_kernel(
    parts, online_hidden_bias, online_weight, online_bias, target_hidden_bias, target_weight, target_bias, hidden, q,
    images, online_rows, kept, actions,
    splits: tl.constexpr, width: tl.constexpr, tile_actions: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    network = (image >= online_rows).to(tl.int32)
    action = tl.arange(0, tile_actions)
    values = tl.zeros((tile_actions, columns), tl.float32)
    for first in range(0, width, columns):
        column = first + tl.arange(0, columns)
        unit = either(online_hidden_bias, target_hidden_bias, column, network, column < width)
        for split in tl.static_range(splits):
            unit += tl.load(parts + (split * images + image) * width + column)
        unit = tl.maximum(unit, 0.0)
        tl.store(hidden + image * width + column, unit, mask=(column < width) & (image < kept))
        place = action[:, None] * width + column[None, :]
        values += unit[None, :] * either(online_weight, target_weight, place, network, (action < actions)[:, None])
    value = tl.sum(values, axis=1) + either(online_bias, target_bias, action, network, action < actions)
    tl.store(q + image * actions + action, value, mask=action < actions)


@triton.jit
def _several_kernel(
    parts, online_hidden_bias, online_weight, online_bias, target_hidden_bias, target_weight, target_bias, hidden, q,
    images, online_rows, online_tiles, kept, actions,
    splits: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, tile_actions: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    network = (tile >= online_tiles).to(tl.int32)
    row = network * online_rows + (tile - network * online_tiles) * rows + tl.arange(0, rows)
    inside = row < tl.where(network == 0, online_rows, images)
    action = tl.arange(0, tile_actions)
    values = tl.zeros((rows, tile_actions), tl.float32)
    for first in range(0, width, columns):
        column = first + tl.arange(0, columns)
        place = row[:, None] * width + column[None, :]
        unit = tl.zeros((rows, columns), tl.float32)
        for split in tl.static_range(splits):
            unit += tl.load(parts + split * images * width + place, mask=inside[:, None], other=0.0)
        bias = either(online_hidden_bias, target_hidden_bias, column, network, column < width)
        unit = tl.maximum(unit + bias[None, :], 0.0)
        tl.store(hidden + place, unit, mask=(row < kept)[:, None])
        place = column[:, None] + action[None, :] * width
        weight = either(online_weight, target_weight, place, network, (action < actions)[None, :])
        values = tl.dot(unit, weight, values, input_precision="tf32x3")
    values += either(online_bias, target_bias, action, network, action < actions)[None, :]
    mask = inside[:, None] & (action < actions)[None, :]
    tl.store(q + row[:, None] * actions + action[None, :], values, mask=mask)


@triton.jit
def _backward_kernel(
    upstream, hidden, weights, hidden_slope, weight_out, bias_out,
    batch, actions, weight_step, bias_step,
    width: tl.constexpr, share: tl.constexpr, rows: tl.constexpr, tile_actions: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    action = tl.arange(0, tile_actions)
    known = action < actions
    weight_place = action[:, None] * width + column[None, :]
    weight = tl.load(weights + weight_place, mask=known[:, None], other=0.0)
    weight_total = tl.zeros((tile_actions, columns), tl.float32)
    bias_total = tl.zeros((tile_actions,), tl.float32)
    last = tl.minimum(split * share + share, batch)
    for done in range(0, share, rows):
        row = split * share + done + tl.arange(0, rows)
        inside = row < last
        mask = inside[:, None] & known[None, :]
        gradient = tl.load(upstream + row[:, None] * actions + action[None, :], mask=mask, other=0.0)
        place = row[:, None] * width + column[None, :]
        unit = tl.load(hidden + place, mask=inside[:, None], other=0.0)
        below = tl.where(unit > 0, tl.dot(gradient, weight, input_precision="tf32x3"), 0.0)
        tl.store(hidden_slope + place, below.to(hidden_slope.dtype.element_ty), mask=inside[:, None])
        weight_total = tl.dot(tl.trans(gradient), unit, weight_total, input_precision="tf32x3")
        bias_total += tl.sum(gradient, axis=0)
    tl.store(weight_out + split * weight_step + weight_place, weight_total, mask=known[:, None])
    if tl.program_id(0) == 0:
        tl.store(bias_out + split * bias_step + action, bias_total, mask=known)
