"""The small network's backward pass below the dense layer's outputs: its weights, its features, the convolution."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qfleet.accel.kernels.conv import Tile
from qfleet.accel.kernels.small_cnn import (
    Layer,
    Shape,
    normalised_conv,
    patch_places,
    patch_weights,
    rounds_for,
    row_of,
)


def dense_back(
    shape: Shape,
    weight_tile: Tile,
    input_tile: Tile,
    features: Tensor,
    slope: Tensor,
    weight: Tensor,
    weight_out: Tensor,
    slope_out: Tensor,
    form: str,
) -> None:
    """Write the gradients of the dense layer's weight [H, F] and of its features [B, F], in one launch.

    `slope` [B, H] is the gradient of its outputs. A tile of the weight has units, features and samples as rows, columns
    and depth; one of the features has samples, features and units.
    """
    batch, inputs, units = len(features), shape.features, shape.units
    weight_columns, input_columns = (triton.cdiv(inputs, tile.columns) for tile in (weight_tile, input_tile))
    weight_blocks = units // weight_tile.rows * weight_columns
    input_blocks = triton.cdiv(batch, input_tile.rows) * input_columns
    _dense_back_kernel[(weight_blocks + input_blocks,)](
        features, slope, weight, weight_out, slope_out, batch,
        inputs=inputs, units=units, weight_blocks=weight_blocks,
        weight_columns=weight_columns, weight_rows=weight_tile.rows, weight_width=weight_tile.columns,
        weight_depth=weight_tile.depth, weight_rounds=rounds_for(batch, weight_tile.depth),
        input_columns=input_columns, input_rows=input_tile.rows, input_width=input_tile.columns,
        input_depth=input_tile.depth, form=form, num_warps=weight_tile.warps, num_stages=weight_tile.stages,
    )  # fmt: skip


def conv_back(
    shape: Shape,
    conv: Layer,
    images: Tensor,
    chosen: Tensor | None,
    slope: Tensor,
    sums: Tensor,
    form: str,
    samples: int,
    warps: int,
) -> None:
    """Write partial sums [programs, Shape.conv_sums] of the gradients of the convolution (weight, bias) and its norm.

    `slope` [B, F] is the gradient of the features after ReLU. A program adds up `samples` of them. What the forward
    pass computed is computed again: all it needs is read here anyway.
    """
    _conv_back_kernel[(len(sums),)](
        images, chosen, *conv, slope, sums, len(slope),
        **shape.conv_constants(), form=form, samples=samples, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _dense_back_kernel(
    features, slope, weights, weight_out, slope_out, batch,
    inputs: tl.constexpr, units: tl.constexpr, weight_blocks: tl.constexpr,
    weight_columns: tl.constexpr, weight_rows: tl.constexpr, weight_width: tl.constexpr, weight_depth: tl.constexpr,
    weight_rounds: tl.constexpr, input_columns: tl.constexpr, input_rows: tl.constexpr, input_width: tl.constexpr,
    input_depth: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < weight_blocks:
        _write_weight(
            features, slope, weight_out, batch,
            block // weight_columns * weight_rows, block % weight_columns * weight_width,
            inputs, units, weight_rows, weight_width, weight_depth, weight_rounds, form,
        )  # fmt: skip
    else:
        block -= weight_blocks
        _write_slope(
            slope, weights, slope_out, batch,
            block // input_columns * input_rows, block % input_columns * input_width,
            inputs, units, input_rows, input_width, input_depth, form,
        )  # fmt: skip


@triton.jit
def _write_weight(
    features, slope, out, batch, first, first_column,
    inputs: tl.constexpr, units: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
    rounds: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the weights of `rows` units, from `first` on, for some features."""
    unit, line = first + tl.arange(0, rows), tl.arange(0, depth)[:, None]
    column = first_column + tl.arange(0, width)
    known = (column < inputs)[None, :]
    total = tl.zeros((rows, width), tl.float32)
    for turn in range(rounds):
        inside = turn * depth + line < batch
        upstream = tl.load(slope + line * units + unit[None, :], mask=inside, other=0.0)
        feature = tl.load(features + line * inputs + column[None, :], mask=inside & known, other=0.0)
        total = tl.dot(tl.trans(upstream), feature, total, input_precision=form)
        slope += depth * units
        features += depth * inputs
    tl.store(out + unit[:, None] * inputs + column[None, :], total, mask=known)


@triton.jit
def _write_slope(
    slope, weights, out, batch, first, first_column,
    inputs: tl.constexpr, units: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """Write the gradient of some features of `rows` samples, from `first` on."""
    line, column = tl.arange(0, rows)[:, None], first_column + tl.arange(0, width)
    known = (column < inputs)[None, :]
    inside = first + line < batch
    slope += first.to(tl.int64) * units
    total = tl.zeros((rows, width), tl.float32)
    for done in range(0, units, depth):
        unit = done + tl.arange(0, depth)
        upstream = tl.load(slope + line * units + unit[None, :], mask=inside, other=0.0)
        weight = tl.load(weights + unit[:, None] * inputs + column[None, :], mask=known, other=0.0)
        total = tl.dot(upstream, weight.to(upstream.dtype), total, input_precision=form)
    place = first.to(tl.int64) * inputs + line * inputs + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside & known)


@triton.jit
def _conv_back_kernel(
    images, chosen, weights, bias, norm_weight, norm_bias, slopes, sums, batch,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, outputs: tl.constexpr,
    tile_positions: tl.constexpr, tile_patch: tl.constexpr, scale: tl.constexpr, epsilon: tl.constexpr,
    form: tl.constexpr, samples: tl.constexpr,
):  # fmt: skip
    positions: tl.constexpr = height * width
    output, position = tl.arange(0, outputs), tl.arange(0, tile_positions)[:, None]
    known = position < positions
    place, within = patch_places(channels, height, width, tile_positions, tile_patch)
    kind: tl.constexpr = slopes.dtype.element_ty
    weight = patch_weights(weights, channels, outputs, tile_patch, kind)
    shift, gain, base = tl.load(bias + output), tl.load(norm_weight + output), tl.load(norm_bias + output)
    weight_sum = tl.zeros((tile_patch, outputs), tl.float32)
    bias_sum = tl.zeros((outputs,), tl.float32)
    gain_sum, base_sum = bias_sum, bias_sum
    for step in range(samples):
        item = tl.program_id(0) * samples + step
        image = images + row_of(chosen, item, item < batch) * (channels * positions)
        patches = tl.load(image + place, mask=within & (item < batch), other=0).to(tl.float32).to(kind)
        value, inverse = normalised_conv(patches, weight, shift, known, outputs * positions, scale, epsilon, form)
        start = slopes + item.to(tl.int64) * (outputs * positions)
        slope = tl.load(start + output[None, :] * positions + position, mask=known & (item < batch), other=0.0)
        slope = tl.where(value * gain[None, :] + base[None, :] > 0, slope.to(tl.float32), 0.0)
        gain_sum += tl.sum(slope * value, axis=0)
        base_sum += tl.sum(slope, axis=0)
        slope *= gain[None, :]
        along = tl.sum(slope * value) / (outputs * positions)
        slope = inverse * (slope - tl.sum(slope) / (outputs * positions) - value * along)
        slope = tl.where(known, slope, 0.0)
        bias_sum += tl.sum(slope, axis=0)
        weight_sum = tl.dot(tl.trans(patches), slope.to(kind), weight_sum, input_precision=form)
    _write_conv_sums(weight_sum * scale, bias_sum, gain_sum, base_sum, sums, channels, outputs, tile_patch)


@triton.jit
def _write_conv_sums(
    weight_sum, bias_sum, gain_sum, base_sum, sums, channels: tl.constexpr, outputs: tl.constexpr,
    tile_patch: tl.constexpr,
):  # fmt: skip
    patch: tl.constexpr = 9 * channels
    output, entry = tl.arange(0, outputs), tl.arange(0, tile_patch)[:, None]
    sums += tl.program_id(0) * (outputs * (patch + 3))
    tl.store(sums + output[None, :] * patch + entry, weight_sum, mask=entry < patch)
    sums += outputs * patch
    tl.store(sums + output, bias_sum)
    tl.store(sums + outputs + output, gain_sum)
    tl.store(sums + 2 * outputs + output, base_sum)
