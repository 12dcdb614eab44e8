"""The small network's dense layer, norm and last layer in one launch: to values, or to the loss and back again.

Programs share out the sums over features. The one that ends last among those of the same rows adds their parts, in a
fixed order, and does what is left: it has whole rows, which the norm needs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from qfleet.accel.kernels.conv import Tile
from qfleet.accel.kernels.small_cnn import Last, Layer, Samples, Shape, row_of


class Parts(NamedTuple):
    """Where programs of the same rows meet."""

    sums: Tensor  # [splits, B, H] float32
    tickets: Tensor  # [row blocks or more] int32: how many have ended; 0 between launches


class Slopes(NamedTuple):
    """What learning leaves behind for the rest of the backward pass."""

    dense: Tensor  # [B, H] gradient of the dense layer's outputs before the norm, in the type of the product
    sums: Tensor  # [row blocks, Shape.dense_sums] gradients of the last layer (weight, bias), the norm, the dense bias
    terms: Tensor  # [row blocks, 2] parts of the mean error and of the mean value
    error: Tensor | None  # [B] value less goal; None if nobody asks


def values(
    shape: Shape, tile: Tile, features: Tensor, dense: Layer, last: Last, parts: Parts, q: Tensor, form: str
) -> None:
    """Write the values `q` [B, A] of features [B, F]. A tile's columns are all units."""
    _dense_head_kernel[_grid(tile, q, parts)](
        features, *dense, *last, *parts, q, None, None, None, None, None, None, None, None, None,
        len(q), 0.0, **_constants(shape, tile, parts), form=form, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def learn(
    shape: Shape,
    tile: Tile,
    features: Tensor,
    dense: Layer,
    last: Last,
    parts: Parts,
    samples: Samples,
    divisor: Tensor,
    threshold: float,
    slopes: Slopes,
    form: str,
) -> None:
    """Compare the values of features [B, F] with the samples' goals and go back to the dense layer's outputs.

    The loss is the sum of weighted Huber errors over `divisor` []; an infinite `threshold` makes them half squares.
    """
    _dense_head_kernel[_grid(tile, features, parts)](
        features, *dense, *last, *parts, None, *samples[1:], divisor, *slopes,
        len(features), threshold, **_constants(shape, tile, parts), form=form,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _grid(tile: Tile, rows: Tensor, parts: Parts) -> tuple[int, int]:
    blocks, splits = triton.cdiv(len(rows), tile.rows), len(parts.sums)
    if splits > 1 and blocks > len(parts.tickets):
        raise ValueError(f"{blocks} blocks of rows need as many tickets, not {len(parts.tickets)}")
    return blocks, splits


def _constants(shape: Shape, tile: Tile, parts: Parts) -> dict[str, int | float]:
    splits = len(parts.sums)
    return {
        "inputs": shape.features,
        "units": shape.units,
        "actions": shape.actions,
        "epsilon": shape.dense_epsilon,
        "splits": splits,
        "share": triton.cdiv(shape.features, splits * tile.depth) * tile.depth,
        "rows": tile.rows,
        "depth": tile.depth,
        "tile_actions": max(16, int(triton.next_power_of_2(shape.actions))),
    }


@triton.jit
def _dense_head_kernel(
    features, weights, bias, norm_weight, norm_bias, last_weight, last_bias, parts, tickets, q,
    chosen, actions_taken, goals, sample_weights, divisor, slope_out, sums, terms, error_out,
    batch, threshold,
    inputs: tl.constexpr, units: tl.constexpr, actions: tl.constexpr, epsilon: tl.constexpr, splits: tl.constexpr,
    share: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, tile_actions: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    item, unit = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, units)
    inside = item < batch
    total = _product(features, weights, batch, inputs, units, share, rows, depth, form)
    total, whole = _collected(total, parts, tickets, item, inside, batch, units, splits)
    if whole:
        value, inverse = _normalised(total + tl.load(bias + unit)[None, :], units, epsilon)
        gain, base = tl.load(norm_weight + unit), tl.load(norm_bias + unit)
        hidden = tl.maximum(value * gain[None, :] + base[None, :], 0.0)
        if q is not None:
            _write_values(hidden, last_weight, last_bias, q, item, inside, units, actions)
        else:
            row = row_of(chosen, item, inside)
            slope, one_hot = _compare(
                hidden, last_weight, last_bias, row, inside, actions_taken, goals, sample_weights, tl.load(divisor),
                threshold, terms, error_out, item, units, tile_actions,
            )  # fmt: skip
            sums += tl.program_id(0) * (actions * (units + 1) + 3 * units)
            _write_last_sums(one_hot, hidden, sums, units, actions, tile_actions)
            sums += actions * (units + 1)
            slope = _through_norm(slope, value, inverse, gain, sums, units)
            place = slope_out + (tl.program_id(0) * rows).to(tl.int64) * units
            place += tl.arange(0, rows)[:, None] * units + unit[None, :]
            tl.store(place, slope.to(slope_out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _product(
    features, weights, batch,
    inputs: tl.constexpr, units: tl.constexpr, share: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """Return this program's part [R, H] of the product of its rows' features and the dense layer's weights."""
    first = tl.program_id(0) * rows
    line, unit = tl.arange(0, rows)[:, None], tl.arange(0, units)[None, :]
    features += first.to(tl.int64) * inputs
    total = tl.zeros((rows, units), tl.float32)
    for done in range(0, share, depth):
        entry = tl.program_id(1) * share + done + tl.arange(0, depth)
        mask = (first + line < batch) & (entry < inputs)[None, :]
        feature = tl.load(features + line * inputs + entry[None, :], mask=mask, other=0.0)
        weight = tl.load(weights + unit * inputs + entry[:, None], mask=(entry < inputs)[:, None], other=0.0)
        total = tl.dot(feature, weight.to(feature.dtype), total, input_precision=form)
    return total


@triton.jit
def _collected(total, parts, tickets, item, inside, batch, units: tl.constexpr, splits: tl.constexpr):
    """Return the sums [R, H] of all parts, and whether this program is the one that has them."""
    if splits == 1:
        return total, tl.program_id(1) == 0
    else:
        place = item[:, None] * units + tl.arange(0, units)[None, :]
        step = batch * units
        tl.store(parts + tl.program_id(1) * step + place, total, mask=inside[:, None])
        tl.debug_barrier()  # all threads of this program have written before one of them takes the ticket
        whole = tl.atomic_add(tickets + tl.program_id(0), 1, sem="acq_rel") == splits - 1
        tl.store(tickets + tl.program_id(0), 0, mask=whole)
        mask = inside[:, None] & whole
        total = tl.load(parts + place, mask=mask, other=0.0, cache_modifier=".cg")
        for split in tl.static_range(1, splits):
            total += tl.load(parts + split * step + place, mask=mask, other=0.0, cache_modifier=".cg")
        return total, whole


@triton.jit
def _normalised(total, units: tl.constexpr, epsilon):
    """Return rows [R, H] with mean 0 and variance 1, and what they were multiplied by for that [R, 1]."""
    centred = total - tl.sum(total, axis=1, keep_dims=True) / units
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / units + epsilon)
    return centred * inverse, inverse


@triton.jit
def _write_values(hidden, last_weight, last_bias, q, item, inside, units: tl.constexpr, actions: tl.constexpr):
    for action in range(actions):  # too few for a product
        weight = tl.load(last_weight + action * units + tl.arange(0, units))
        value = tl.sum(hidden * weight[None, :], axis=1) + tl.load(last_bias + action)
        tl.store(q + item * actions + action, value, mask=inside)


@triton.jit
def _compare(
    hidden, last_weight, last_bias, row, inside, actions_taken, goals, sample_weights, divisor, threshold, terms,
    error_out, item, units: tl.constexpr, tile_actions: tl.constexpr,
):  # fmt: skip
    """Return the gradients of the dense layer's outputs after ReLU and norm [R, H] and of the values [R, actions].

    Only the value of the action taken counts, so each row meets a single row of the last layer's weights.
    """
    action = tl.load(actions_taken + row, mask=inside, other=0).to(tl.int32)
    weight = tl.load(last_weight + action[:, None] * units + tl.arange(0, units)[None, :])
    value = tl.sum(hidden * weight, axis=1) + tl.load(last_bias + action)
    error = value - tl.load(goals + row, mask=inside, other=0.0)
    share = inside.to(tl.float32) / divisor
    if sample_weights is not None:
        share *= tl.load(sample_weights + row, mask=inside, other=0.0)
    size = tl.abs(error)
    loss = tl.where(size <= threshold, 0.5 * error * error, threshold * (size - 0.5 * threshold))
    tl.store(terms + tl.program_id(0) * 2, tl.sum(loss * share))
    tl.store(terms + tl.program_id(0) * 2 + 1, tl.sum(value * share))
    if error_out is not None:
        tl.store(error_out + item, error, mask=inside)
    upstream = tl.minimum(tl.maximum(error, -threshold), threshold) * share
    slope = tl.where(hidden > 0, upstream[:, None] * weight, 0.0)
    taken = action[:, None] == tl.arange(0, tile_actions)[None, :]
    return slope, tl.where(taken, upstream[:, None], 0.0)


@triton.jit
def _write_last_sums(
    one_hot, hidden, sums, units: tl.constexpr, actions: tl.constexpr, tile_actions: tl.constexpr
):  # fmt: skip
    action, unit = tl.arange(0, tile_actions), tl.arange(0, units)
    total = tl.dot(tl.trans(one_hot), hidden, input_precision="tf32x3")
    tl.store(sums + action[:, None] * units + unit[None, :], total, mask=(action < actions)[:, None])
    tl.store(sums + actions * units + action, tl.sum(one_hot, axis=0), mask=action < actions)


@triton.jit
def _through_norm(slope, value, inverse, gain, sums, units: tl.constexpr):
    """Return the gradient [R, H] of what the norm was given; write sums of its weight's, its bias's and this one."""
    unit = tl.arange(0, units)
    tl.store(sums + unit, tl.sum(slope * value, axis=0))
    tl.store(sums + units + unit, tl.sum(slope, axis=0))
    slope *= gain[None, :]
    along = tl.sum(slope * value, axis=1, keep_dims=True) / units
    slope = inverse * (slope - tl.sum(slope, axis=1, keep_dims=True) / units - value * along)
    tl.store(sums + 2 * units + unit, tl.sum(slope, axis=0))
    return slope
