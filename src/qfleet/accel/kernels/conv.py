"""Convolutions and dense layers as matrix products whose patches are gathered on the way to the arithmetic units.

Images lie channels last, [I, H, W, C]. Each output position is a row of a product, and the patch it sees is read where
it lies. Three products cover a layer:

- forward: patches [I * positions, K] x weights [K, N], then bias and ReLU. K runs over (kernel row, kernel column,
  channel), so that a kernel row is one contiguous run of the image.
- gradient of the input: with stride S and kernel S * T, the S * S pixels of a cell of the input are seen by the same
  T * T outputs. So cells are rows, the outputs that see them are the depth, and a cell's pixels times channels are
  columns: a convolution with stride 1 over the upstream gradient. The ReLU of the layer below masks what is stored.
- gradient of the weights: patches^T x upstream gradient. Rows are shared out among `splits` programs; each writes its
  own partial sums, which are added later in a fixed order: the result is the same in every run.

Two networks of equal shape are evaluated by one launch: the program's number selects the weights. Weights lie as
[N, K] in the type of the product; sums are float32.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """What one program computes, and how: a block [rows, columns] of the result, `depth` entries of the sum a round."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Conv:
    """The shape of a convolution without padding; a dense layer is one over a single pixel."""

    height: int
    width: int
    channels: int
    outputs: int
    kernel: int = 1
    stride: int = 1

    @property
    def out_height(self) -> int:
        """Rows of the output image."""
        return (self.height - self.kernel) // self.stride + 1

    @property
    def out_width(self) -> int:
        """Columns of the output image."""
        return (self.width - self.kernel) // self.stride + 1

    @property
    def positions(self) -> int:
        """Pixels of the output image."""
        return self.out_height * self.out_width

    @property
    def patch(self) -> int:
        """Entries of a patch: weights of one output."""
        return self.kernel * self.kernel * self.channels

    def gather(self, planes: bool = False) -> dict[str, int]:
        """Return where a kernel finds the patches: distances in elements of the input tensor."""
        pixel, run = (1, self.kernel) if planes else (self.channels, self.kernel * self.channels)
        return {
            "image": self.height * self.width * self.channels,
            "positions": self.positions,
            "out_width": self.out_width,
            "right": self.stride * pixel,
            "down": self.stride * self.width * pixel,
            "run": run,
            "line": self.width * pixel,
            "plane_entries": self.kernel * run,
            "plane": self.height * self.width,
        }


def conv_forward(
    conv: Conv, tile: Tile, images: Tensor, online: int, weights: Tensor, biases: tuple[Tensor, Tensor], out: Tensor
) -> None:
    """Write the layer's output [I, positions, N] after ReLU; the first `online` images use weights[0], others [1]."""
    _launch_forward(conv, tile, images, online, weights, biases, out, splits=1, partial=False)


def conv_partials(conv: Conv, tile: Tile, images: Tensor, online: int, weights: Tensor, out: Tensor) -> None:
    """Write float32 parts [splits, I, positions, N] of the layer's output, whose sum lacks bias and ReLU only."""
    _launch_forward(conv, tile, images, online, weights, (weights, weights), out, splits=len(out), partial=True)


def conv_backward_input(conv: Conv, tile: Tile, upstream: Tensor, weights: Tensor, images: Tensor, out: Tensor) -> None:
    """Write the gradient [I, H, W, C] of the layer's input, zero where the input `images` (after ReLU) is not positive.

    `upstream` [I, positions, N] is the gradient of the layer's output before its ReLU, `weights` [N, K].
    """
    if conv.kernel % conv.stride:
        raise ValueError(f"the kernel {conv.kernel} must be a multiple of the stride {conv.stride}")
    cell_columns = -(-conv.width // conv.stride)
    cells = -(-conv.height // conv.stride) * cell_columns
    columns = conv.stride * conv.stride * conv.channels
    rows = len(upstream) * cells
    _input_kernel[(triton.cdiv(rows, tile.rows), columns // _divisor(columns, tile.columns))](
        upstream, weights, images, out, rows,
        height=conv.height, width=conv.width, channels=conv.channels, outputs=conv.outputs,
        kernel=conv.kernel, stride=conv.stride, out_height=conv.out_height, out_width=conv.out_width,
        cells=cells, cell_columns=cell_columns,
        tile_rows=tile.rows, tile_columns=tile.columns, depth=_divisor(conv.outputs, tile.depth),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def conv_backward_weight(
    conv: Conv,
    tile: Tile,
    images: Tensor,
    upstream: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
) -> None:
    """Write partial sums of the gradients of weights [splits, N, K] and bias [splits, N], in float32.

    A tile's rows are entries of a patch, its columns outputs, its depth output positions.
    """
    rows, splits = len(upstream) * conv.positions, len(weight_out)
    patch_tiles = conv.patch // _divisor(conv.patch, tile.rows)
    _weight_kernel[(patch_tiles + 1, conv.outputs // _divisor(conv.outputs, tile.columns), splits)](
        images, upstream, weight_out, bias_out, rows, weight_out.stride(0), bias_out.stride(0),
        **conv.gather(), patch=conv.patch, outputs=conv.outputs, rounds=triton.cdiv(rows, splits * tile.depth),
        tile_rows=tile.rows, tile_columns=tile.columns, depth=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _launch_forward(
    conv: Conv,
    tile: Tile,
    images: Tensor,
    online: int,
    weights: Tensor,
    biases: tuple[Tensor, Tensor],
    out: Tensor,
    splits: int,
    partial: bool,
) -> None:
    rows, online_rows = len(images) * conv.positions, online * conv.positions
    online_tiles = triton.cdiv(online_rows, tile.rows)
    tiles = online_tiles + triton.cdiv(rows - online_rows, tile.rows)
    depth = conv.patch // splits
    _forward_kernel[(tiles, conv.outputs // _divisor(conv.outputs, tile.columns), splits)](
        images, weights, *biases, out, rows, online_rows, online_tiles, weights.stride(0),
        **conv.gather(), patch=conv.patch, outputs=conv.outputs, share=depth, partial=partial,
        tile_rows=tile.rows, tile_columns=tile.columns, depth=_divisor(depth, tile.depth),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _divisor(whole: int, part: int) -> int:
    """Return `part`, which must divide `whole`: only rows of the result may be ragged."""
    if whole % part:
        raise ValueError(f"a tile's side of {part} does not divide {whole}")
    return part


@triton.jit
def patch_start(
    row, image: tl.constexpr, positions: tl.constexpr, out_width: tl.constexpr, right: tl.constexpr,
    down: tl.constexpr,
):  # fmt: skip
    """Return where the patch of each output position begins."""
    position = row % positions
    return row // positions * image + position // out_width * down + position % out_width * right


@triton.jit
def entries(
    first, count: tl.constexpr, run: tl.constexpr, line: tl.constexpr, plane_entries: tl.constexpr, plane: tl.constexpr
):
    """Return how far `count` entries of a patch, from number `first` on, lie from the patch's first one."""
    if run % count == 0:  # all in one run: said in this way, the compiler sees that they are neighbours
        line_number = first // run
        return line_number * line + (first - line_number * run) + tl.arange(0, count)
    else:
        number = first + tl.arange(0, count)
        return number // plane_entries * plane + number // run % (plane_entries // run) * line + number % run


@triton.jit
def operand(values, kind: tl.constexpr):
    """Return values in the type of a product. Bytes go through the mantissa of 2 ** 23: conversions are slow."""
    if values.dtype == tl.uint8:
        values = (values.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return values.to(kind)


@triton.jit
def product(
    images, weights, start, column, first,
    run: tl.constexpr, line: tl.constexpr, plane_entries: tl.constexpr, plane: tl.constexpr,
    share: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Return patches that begin at `start` times weights that begin at `column`, over `share` entries from `first`."""
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for done in range(0, share, depth):
        entry = entries(first + done, depth, run, line, plane_entries, plane)
        patches = tl.load(images + start[:, None] + entry[None, :])
        weight = tl.load(weights + column[None, :] + (first + done + tl.arange(0, depth))[:, None])
        total = tl.dot(operand(patches, weight.dtype), weight, total, input_precision="ieee")
    return total


@triton.jit
def _forward_kernel(
    images, weights, online_bias, target_bias, out,
    rows, online_rows, online_tiles, weight_step,
    image: tl.constexpr, positions: tl.constexpr, out_width: tl.constexpr, right: tl.constexpr, down: tl.constexpr,
    run: tl.constexpr, line: tl.constexpr, plane_entries: tl.constexpr, plane: tl.constexpr,
    patch: tl.constexpr, outputs: tl.constexpr, share: tl.constexpr, partial: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(2)
    network = (tile >= online_tiles).to(tl.int32)
    row = network * online_rows + (tile - network * online_tiles) * tile_rows + tl.arange(0, tile_rows)
    end = tl.where(network == 0, online_rows, rows)
    start = patch_start(tl.minimum(row, end - 1), image, positions, out_width, right, down)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    total = product(
        images, weights + network * weight_step, start, column * patch, split * share,
        run, line, plane_entries, plane, share, tile_rows, tile_columns, depth,
    )  # fmt: skip
    place = row[:, None] * outputs + column[None, :]
    if partial:
        place += split * rows * outputs
    else:
        bias = tl.where(network == 0, tl.load(online_bias + column), tl.load(target_bias + column))
        total = tl.maximum(total + bias[None, :], 0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(row < end)[:, None])


@triton.jit
def _input_kernel(
    upstream, weights, images, out, rows,
    height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, outputs: tl.constexpr,
    kernel: tl.constexpr, stride: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    cells: tl.constexpr, cell_columns: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    image, cell_y, cell_x = row // cells, row % cells // cell_columns, row % cells % cell_columns
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    pixel_y, across = column // (stride * channels), column % (stride * channels)
    chunks: tl.constexpr = outputs // depth
    taps: tl.constexpr = kernel // stride
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for step in range(taps * taps * chunks):
        tap_y, tap_x = step // chunks // taps, step // chunks % taps
        output = step % chunks * depth + tl.arange(0, depth)
        y, x = cell_y - tap_y, cell_x - tap_x
        seen = (row < rows) & (y >= 0) & (y < out_height) & (x >= 0) & (x < out_width)
        place = ((image * out_height + y) * out_width + x) * outputs
        gradient = tl.load(upstream + place[:, None] + output[None, :], mask=seen[:, None], other=0.0)
        entry = ((pixel_y + stride * tap_y) * kernel + stride * tap_x) * channels + across
        weight = tl.load(weights + (output * (kernel * kernel * channels))[:, None] + entry[None, :])
        total = tl.dot(gradient, weight, total, input_precision="ieee")
    y = cell_y[:, None] * stride + pixel_y[None, :]
    x_channel = cell_x[:, None] * (stride * channels) + across[None, :]
    inside = (row < rows)[:, None] & (y < height) & (x_channel < width * channels)
    place = (image[:, None] * height + y) * (width * channels) + x_channel
    alive = tl.load(images + place, mask=inside, other=0.0).to(tl.float32) > 0
    tl.store(out + place, tl.where(alive, total, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weight_kernel(
    images, upstream, weight_out, bias_out,
    rows, weight_step, bias_step,
    image: tl.constexpr, positions: tl.constexpr, out_width: tl.constexpr, right: tl.constexpr, down: tl.constexpr,
    run: tl.constexpr, line: tl.constexpr, plane_entries: tl.constexpr, plane: tl.constexpr,
    patch: tl.constexpr, outputs: tl.constexpr, rounds: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(2)
    output = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    if tile < patch // tile_rows:
        entry = entries(tile * tile_rows, tile_rows, run, line, plane_entries, plane)
        total = tl.zeros((tile_rows, tile_columns), tl.float32)
        for turn in range(rounds):
            row = (split * rounds + turn) * depth + tl.arange(0, depth)
            start = patch_start(tl.minimum(row, rows - 1), image, positions, out_width, right, down)
            patches = tl.load(images + start[:, None] + entry[None, :])
            gradient = tl.load(
                upstream + row[:, None] * outputs + output[None, :], mask=(row < rows)[:, None], other=0.0
            )
            total = tl.dot(tl.trans(patches), gradient, total, input_precision="ieee")
        place = split * weight_step + output[None, :] * patch + (tile * tile_rows + tl.arange(0, tile_rows))[:, None]
        tl.store(weight_out + place, total)
    else:
        bias = column_sum(upstream, split * rounds * depth, rows, output, outputs, rounds, tile_columns, depth)
        tl.store(bias_out + split * bias_step + output, bias)


@triton.jit
def column_sum(
    upstream, first, rows, output, outputs: tl.constexpr, rounds: tl.constexpr, columns: tl.constexpr,
    depth: tl.constexpr,
):  # fmt: skip
    """Return the sums [columns] of the gradients of some outputs over `rounds * depth` rows from `first` on."""
    total = tl.zeros((columns,), tl.float32)
    for turn in range(rounds):
        row = first + turn * depth + tl.arange(0, depth)
        gradient = tl.load(upstream + row[:, None] * outputs + output[None, :], mask=(row < rows)[:, None], other=0.0)
        total += tl.sum(gradient.to(tl.float32), axis=0)
    return total
