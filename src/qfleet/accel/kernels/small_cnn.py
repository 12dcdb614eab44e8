"""What the kernels of the small convolutional network share: its shape, its weights, its patches and its first norm.

The network: a padded 3x3 convolution, a norm over all its outputs with weights for each channel, ReLU, a dense layer, a
norm over its units, ReLU, and a last layer with one value for each action. Images lie channels first.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Layer(NamedTuple):
    """A layer and the norm after it."""

    weight: Tensor  # [N, C, 3, 3] of the convolution, [N, C] of the dense layer
    bias: Tensor  # [N]
    norm_weight: Tensor  # [N]
    norm_bias: Tensor  # [N]


class Last(NamedTuple):
    """The last layer."""

    weight: Tensor  # [A, H]
    bias: Tensor  # [A]


class Samples(NamedTuple):
    """What is learned from: B rows of S, each row an observation, an action and the value it should have had."""

    images: Tensor  # [S, C, H, W] contiguous numbers
    chosen: Tensor | None  # [B] the rows; None for all
    action: Tensor  # [S] int64
    goal: Tensor  # [S] float32
    weight: Tensor | None  # [S] float32; None for ones


@dataclass(frozen=True)
class Shape:
    """The network's sizes and constants."""

    channels: int
    height: int
    width: int
    outputs: int
    """Channels of the convolution's output."""
    units: int
    """Width of the dense layer."""
    actions: int
    scale: float
    """What inputs are multiplied by."""
    conv_epsilon: float
    dense_epsilon: float
    """What the norms add to the variance."""

    @property
    def positions(self) -> int:
        """Pixels of an image."""
        return self.height * self.width

    @property
    def patch(self) -> int:
        """Weights of one output channel."""
        return 9 * self.channels

    @property
    def features(self) -> int:
        """Outputs of the convolution."""
        return self.outputs * self.positions

    @property
    def conv_sums(self) -> int:
        """Entries of the gradients of the convolution and its norm."""
        return self.outputs * (self.patch + 3)

    @property
    def dense_sums(self) -> int:
        """Entries of the gradients of the last layer, the dense layer's bias and its norm."""
        return self.actions * (self.units + 1) + 3 * self.units

    def conv_constants(self) -> dict[str, int | float]:
        """Return what a kernel needs to know of the convolution."""
        return {
            "channels": self.channels,
            "height": self.height,
            "width": self.width,
            "outputs": self.outputs,
            "tile_positions": int(triton.next_power_of_2(self.positions)),
            "tile_patch": max(16, int(triton.next_power_of_2(self.patch))),
            "scale": self.scale,
            "epsilon": self.conv_epsilon,
        }


def rounds_for(count: int, each: int) -> int:
    """Return a number of rounds that covers `count` items: a power of two, so that few kernels have to be compiled."""
    return int(triton.next_power_of_2(max(triton.cdiv(count, each), 1)))


@triton.jit
def row_of(chosen, item, inside):
    """Return the row of each item of the batch, as int64."""
    if chosen is None:
        return item.to(tl.int64)
    else:
        return tl.load(chosen + item, mask=inside, other=0).to(tl.int64)


@triton.jit
def patch_places(
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, tile_positions: tl.constexpr,
    tile_patch: tl.constexpr,
):  # fmt: skip
    """Return where in an image each position finds its patch, and which entries are within: both [P, K]."""
    position, entry = tl.arange(0, tile_positions)[:, None], tl.arange(0, tile_patch)[None, :]
    y, x = position // width + entry % 9 // 3 - 1, position % width + entry % 3 - 1
    within = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    place = entry // 9 * (height * width) + y * width + x
    return place, within & (position < height * width) & (entry < 9 * channels)


@triton.jit
def patch_weights(weights, channels: tl.constexpr, outputs: tl.constexpr, tile_patch: tl.constexpr, kind: tl.constexpr):
    """Return the convolution's weights [K, N] in the type of the product."""
    entry, output = tl.arange(0, tile_patch)[:, None], tl.arange(0, outputs)[None, :]
    return tl.load(weights + output * (9 * channels) + entry, mask=entry < 9 * channels, other=0.0).to(kind)


@triton.jit
def normalised_conv(patches, weight, bias, known, count: tl.constexpr, scale, epsilon, form: tl.constexpr):
    """Return the convolution's outputs [P, N] with mean 0 and variance 1, and what they were multiplied by for that.

    Positions that are not `known` [P, 1] count for nothing and are 0.
    """
    image = tl.dot(patches, weight, input_precision=form) * scale + bias[None, :]
    mean = tl.sum(tl.where(known, image, 0.0)) / count
    centred = tl.where(known, image - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred) / count + epsilon)
    return centred * inverse, inverse
