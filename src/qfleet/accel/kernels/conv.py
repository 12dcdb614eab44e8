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

Where a layer sees zeros beyond its image's edges, these lie around the image in memory. The layer before writes inside
of them, and nobody writes them, so that no product has to know of edges. Gradients lie without such a border.

Two networks of equal shape are evaluated by one launch: the program's number selects the weights. Weights lie as
[N, K] in the type of the product; sums are float32. The `form` of a product says what becomes of operands in float32:
"tf32" takes 10 bits of them, as tensor cores do, "ieee" all. Operands in bfloat16 are as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
from torch import Tensor

from qfleet.accel.kernels.conv_programs import forward_kernel, input_kernel, weight_kernel


class Tile(NamedTuple):
    """What one program computes, and how: a block [rows, columns] of the result, `depth` entries of the sum a round."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Conv:
    """The shape of a convolution; a dense layer is one over a single pixel."""

    height: int
    width: int
    channels: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    """Rows above and below the input image and columns on either side of it that are zero."""
    border: tuple[int, int] = (0, 0)
    """The same of the output image: the padding of the layer that sees it."""

    @property
    def out_height(self) -> int:
        """Rows of the output image."""
        return (self.stored_input[0] - self.kernel) // self.stride + 1

    @property
    def out_width(self) -> int:
        """Columns of the output image."""
        return (self.stored_input[1] - self.kernel) // self.stride + 1

    @property
    def stored_input(self) -> tuple[int, int]:
        """Rows and columns of the input image as it lies in memory."""
        return self.height + 2 * self.padding[0], self.width + 2 * self.padding[1]

    @property
    def stored_output(self) -> tuple[int, int]:
        """Rows and columns of the output image as it lies in memory."""
        return self.out_height + 2 * self.border[0], self.out_width + 2 * self.border[1]

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
        height, width = self.stored_input
        return {
            "image": height * width * self.channels,
            "positions": self.positions,
            "out_width": self.out_width,
            "right": self.stride * pixel,
            "down": self.stride * width * pixel,
            "run": run,
            "line": width * pixel,
            "plane_entries": self.kernel * run,
            "plane": height * width,
        }

    def scatter(self) -> dict[str, int]:
        """Return where a kernel writes output positions: distances in pixels of the output tensor."""
        height, width = self.stored_output
        return {
            "out_image": height * width,
            "out_line": width,
            "out_first": self.border[0] * width + self.border[1],
        }


def conv_forward(
    conv: Conv,
    tile: Tile,
    images: Tensor,
    online: int,
    weights: Tensor,
    biases: tuple[Tensor, Tensor],
    out: Tensor,
    form: str = "ieee",
) -> None:
    """Write the layer's output after ReLU to `out` [I, stored output, N], inside the border.

    The first `online` of the images [I, stored input, C] use weights[0], others weights[1].
    """
    _launch_forward(conv, tile, images, online, weights, biases, out, form, splits=1, partial=False)


def conv_partials(
    conv: Conv, tile: Tile, images: Tensor, online: int, weights: Tensor, out: Tensor, form: str = "ieee"
) -> None:
    """Write float32 parts [splits, I, positions, N] of the output of a layer without border.

    Their sum lacks bias and ReLU only.
    """
    _launch_forward(conv, tile, images, online, weights, (weights, weights), out, form, splits=len(out), partial=True)


def conv_backward_input(
    conv: Conv, tile: Tile, upstream: Tensor, weights: Tensor, images: Tensor, out: Tensor, form: str = "ieee"
) -> None:
    """Write the gradient [I, H, W, C] of the layer's input, zero where the input (after ReLU) is not positive.

    `upstream` [I, positions, N] is the gradient of the layer's output before its ReLU, `weights` [N, K], `images`
    [I, stored input, C] the input.
    """
    if conv.kernel % conv.stride:
        raise ValueError(f"the kernel {conv.kernel} must be a multiple of the stride {conv.stride}")
    cell_top, cell_rows = _cells(conv.height, conv.padding[0], conv.stride)
    cell_left, cell_columns = _cells(conv.width, conv.padding[1], conv.stride)
    cells, columns = cell_rows * cell_columns, conv.stride * conv.stride * conv.channels
    rows = len(upstream) * cells
    input_kernel[(triton.cdiv(rows, tile.rows), columns // _divisor(columns, tile.columns))](
        upstream, weights, images, out, rows,
        height=conv.height, width=conv.width, channels=conv.channels, outputs=conv.outputs,
        kernel=conv.kernel, stride=conv.stride, out_height=conv.out_height, out_width=conv.out_width,
        padding_y=conv.padding[0], padding_x=conv.padding[1],
        cells=cells, cell_columns=cell_columns, cell_top=cell_top, cell_left=cell_left,
        tile_rows=tile.rows, tile_columns=tile.columns, depth=_divisor(conv.outputs, tile.depth), form=form,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def conv_backward_weight(
    conv: Conv,
    tile: Tile,
    images: Tensor,
    upstream: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    form: str = "ieee",
) -> None:
    """Write partial sums of the gradients of weights [splits, N, K] and bias [splits, N], in float32.

    `images` [I, stored input, C] are the layer's input, `upstream` [I, positions, N] the gradient of its output before
    its ReLU. A tile's rows are entries of a patch, its columns outputs, its depth output positions.
    """
    rows, splits = len(upstream) * conv.positions, len(weight_out)
    patch_tiles = conv.patch // _divisor(conv.patch, tile.rows)
    weight_kernel[(patch_tiles + 1, conv.outputs // _divisor(conv.outputs, tile.columns), splits)](
        images, upstream, weight_out, bias_out, rows, weight_out.stride(0), bias_out.stride(0),
        **conv.gather(), patch=conv.patch, outputs=conv.outputs, rounds=triton.cdiv(rows, splits * tile.depth),
        tile_rows=tile.rows, tile_columns=tile.columns, depth=tile.depth, form=form,
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
    form: str,
    splits: int,
    partial: bool,
) -> None:
    rows, online_rows = len(images) * conv.positions, online * conv.positions
    online_tiles = triton.cdiv(online_rows, tile.rows)
    tiles = online_tiles + triton.cdiv(rows - online_rows, tile.rows)
    depth = conv.patch // splits
    forward_kernel[(tiles, conv.outputs // _divisor(conv.outputs, tile.columns), splits)](
        images, weights, *biases, out, rows, online_rows, online_tiles, weights.stride(0),
        **conv.gather(), **conv.scatter(), patch=conv.patch, outputs=conv.outputs, share=depth, partial=partial,
        tile_rows=tile.rows, tile_columns=tile.columns, depth=_divisor(depth, tile.depth), form=form,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _cells(side: int, padding: int, stride: int) -> tuple[int, int]:
    """Return the first cell of `stride` pixels that has any of an image's `side`, and how many have."""
    first = padding // stride
    return first, (padding + side - 1) // stride - first + 1


def _divisor(whole: int, part: int) -> int:
    """Return `part`, which must divide `whole`: only rows of the result may be ragged."""
    if whole % part:
        raise ValueError(f"a tile's side of {part} does not divide {whole}")
    return part
