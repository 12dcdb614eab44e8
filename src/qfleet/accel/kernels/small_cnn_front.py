"""The small network's features in one launch: rows gathered, convolution, norm and ReLU, one sample at a time."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qfleet.accel.kernels.small_cnn import (
    Layer,
    Shape,
    normalised_conv,
    patch_places,
    patch_weights,
    rounds_for,
    row_of,
)

_WEIGHTS = 1024
"""Weights of samples that are added at a time."""


def front(
    shape: Shape,
    conv: Layer,
    images: Tensor,
    chosen: Tensor | None,
    features: Tensor,
    form: str,
    samples: int,
    warps: int,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
) -> None:
    """Write the features [B, N * positions] of the rows `chosen` [B] (None for all) of `images` [S, C, H, W].

    A program handles `samples` of them. One program more writes, if there is a `divisor` [], the sum of the chosen
    rows' `weight` [S], at least 1; without weights the number of rows.
    """
    batch = len(features)
    blocks = triton.cdiv(batch, samples)
    _front_kernel[(blocks if divisor is None else blocks + 1,)](
        images, chosen, *conv, features, weight, divisor, batch, blocks,
        **shape.conv_constants(), form=form, samples=samples,
        rounds=0 if divisor is None else rounds_for(batch, _WEIGHTS), block=_WEIGHTS, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _front_kernel(
    images, chosen, weights, bias, norm_weight, norm_bias, features, sample_weights, divisor,
    batch, blocks,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, outputs: tl.constexpr,
    tile_positions: tl.constexpr, tile_patch: tl.constexpr, scale: tl.constexpr, epsilon: tl.constexpr,
    form: tl.constexpr, samples: tl.constexpr, rounds: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < blocks:
        _features(
            images, chosen, weights, bias, norm_weight, norm_bias, features, batch,
            channels, height, width, outputs, tile_positions, tile_patch, scale, epsilon, form, samples,
        )  # fmt: skip
    elif divisor is not None:
        _write_divisor(sample_weights, chosen, divisor, batch, rounds, block)


@triton.jit
def _features(
    images, chosen, weights, bias, norm_weight, norm_bias, features, batch,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, outputs: tl.constexpr,
    tile_positions: tl.constexpr, tile_patch: tl.constexpr, scale: tl.constexpr, epsilon: tl.constexpr,
    form: tl.constexpr, samples: tl.constexpr,
):  # fmt: skip
    positions: tl.constexpr = height * width
    output, position = tl.arange(0, outputs), tl.arange(0, tile_positions)[:, None]
    place, within = patch_places(channels, height, width, tile_positions, tile_patch)
    weight = patch_weights(weights, channels, outputs, tile_patch, features.dtype.element_ty)
    shift, gain, base = tl.load(bias + output), tl.load(norm_weight + output), tl.load(norm_bias + output)
    for step in range(samples):
        item = tl.minimum(tl.program_id(0) * samples + step, batch - 1)  # the last one may be written twice
        image = images + row_of(chosen, item, True) * (channels * positions)
        patches = tl.load(image + place, mask=within, other=0).to(tl.float32).to(features.dtype.element_ty)
        value, _ = normalised_conv(
            patches, weight, shift, position < positions, outputs * positions, scale, epsilon, form
        )
        feature = tl.maximum(value * gain[None, :] + base[None, :], 0.0).to(features.dtype.element_ty)
        start = features + item.to(tl.int64) * (outputs * positions)
        tl.store(start + output[None, :] * positions + position, feature, mask=position < positions)


@triton.jit
def _write_divisor(sample_weights, chosen, divisor, batch, rounds: tl.constexpr, block: tl.constexpr):
    total = tl.zeros([block], tl.float32)
    for turn in range(rounds):
        item = turn * block + tl.arange(0, block)
        inside = item < batch
        if sample_weights is None:
            total += inside.to(tl.float32)
        else:
            total += tl.load(sample_weights + row_of(chosen, item, inside), mask=inside, other=0.0)
    tl.store(divisor, tl.maximum(tl.sum(total), 1.0))
