"""The first convolution of a network on bytes, as they lie in a replay: cast and scaled on the way to the products.

Frames are uint8 [B, H, W, C], or [B, C, H, W] ("planes"), where H and W are those of the stored input, with the layer's
padding. Converting a byte costs more than multiplying it, so

- forward: where both networks see an image, its patches are converted once and multiplied by both networks' weights;
- gradient of the weights: with stride S and kernel S * T each byte lies in T * T patches. Images are cut into cells of
  S * S pixels, which are converted once and multiplied by the gradients of the T * T outputs that see them.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qfleet.accel.kernels.conv import Conv, Tile
from qfleet.accel.kernels.conv_programs import column_sum, entries, operand, patch_start, product, stored_pixel


def frames_forward(
    conv: Conv,
    tile: Tile,
    frames: Tensor,
    next_frames: Tensor | None,
    weights: Tensor,
    biases: tuple[Tensor, Tensor],
    out: Tensor,
    planes: bool,
    form: str = "ieee",
) -> None:
    """Evaluate the layer on bytes scaled by 1/255, with its ReLU; weights [2, N, K] and biases of both networks.

    `out` [3 B, stored output, N] gets, inside the border, the online network's output for both kinds of frames and the
    target network's for the next ones; if it has 2 B images, the online network's for the next ones is left out.
    Without next frames it has B.
    """
    batch = len(frames)
    tiles = triton.cdiv(batch * conv.positions, tile.rows)
    _forward_kernel[(tiles if next_frames is None else 2 * tiles,)](
        frames, frames if next_frames is None else next_frames, weights, *biases, out, batch, tiles, weights.stride(0),
        **conv.gather(planes), **conv.scatter(), patch=conv.patch, outputs=conv.outputs, both=len(out) == 3 * batch,
        tile_rows=tile.rows, depth=tile.depth, form=form, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def frames_backward_weight(
    conv: Conv,
    tile: Tile,
    frames: Tensor,
    upstream: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    planes: bool,
    form: str = "ieee",
) -> None:
    """Write partial sums of the gradients of weights [splits, N, K] and bias [splits, N], in float32.

    `upstream` [B, positions, N] is the gradient of the output before its ReLU. A tile's rows are outputs of T * T
    positions, its columns the bytes of a cell, its depth cells.
    """
    taps, splits = conv.kernel // conv.stride, len(weight_out)
    cell_columns, cell_rows = conv.out_width + taps - 1, conv.out_height + taps - 1
    pixel, (height, width) = 1 if planes else conv.channels, conv.stored_input
    cells, positions = len(frames) * cell_rows * cell_columns, len(frames) * conv.positions
    _weight_kernel[(taps * taps * conv.outputs // tile.rows + 1, splits)](
        frames, upstream, weight_out, bias_out, cells, positions, weight_out.stride(0), bias_out.stride(0),
        image=height * width * conv.channels, line=width * pixel, plane=height * width,
        pixel=pixel, outputs=conv.outputs, patch=conv.patch, kernel=conv.kernel, stride=conv.stride,
        out_height=conv.out_height, out_width=conv.out_width, cell_rows=cell_rows, cell_columns=cell_columns,
        rounds=triton.cdiv(cells, splits * tile.depth), bias_rounds=triton.cdiv(positions, splits * tile.depth),
        tile_rows=tile.rows, tile_columns=conv.stride * conv.stride * conv.channels, depth=tile.depth,
        form=form, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _forward_tile(
    frames, weights, online_bias, target_bias, out, row, batch, first_image,
    network: tl.constexpr, networks: tl.constexpr, weight_step,
    image: tl.constexpr, positions: tl.constexpr, out_width: tl.constexpr, right: tl.constexpr, down: tl.constexpr,
    run: tl.constexpr, line: tl.constexpr, plane_entries: tl.constexpr, plane: tl.constexpr,
    out_image: tl.constexpr, out_line: tl.constexpr, out_first: tl.constexpr,
    patch: tl.constexpr, outputs: tl.constexpr, tile_rows: tl.constexpr, depth: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Evaluate `networks` from number `network` on; the first one's output begins at `first_image` of `out`."""
    rows = batch * positions
    column = tl.arange(0, networks * outputs)
    output, chosen = column % outputs, network + column // outputs
    start = patch_start(tl.minimum(row, rows - 1), image, positions, out_width, right, down)
    total = product(
        frames, weights, start, chosen * weight_step + output * patch, 0,
        run, line, plane_entries, plane, patch, tile_rows, networks * outputs, depth, form,
    )  # fmt: skip
    bias = tl.where(chosen == 0, tl.load(online_bias + output), tl.load(target_bias + output))
    total = tl.maximum(total * (1 / 255) + bias[None, :], 0.0)
    pixel = first_image * out_image + stored_pixel(row, positions, out_width, out_image, out_line, out_first)
    place = (pixel[:, None] + (column // outputs * (batch * out_image))[None, :]) * outputs + output[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit
def _forward_kernel(
    frames, next_frames, weights, online_bias, target_bias, out, batch, tiles, weight_step,
    image: tl.constexpr, positions: tl.constexpr, out_width: tl.constexpr, right: tl.constexpr, down: tl.constexpr,
    run: tl.constexpr, line: tl.constexpr, plane_entries: tl.constexpr, plane: tl.constexpr,
    out_image: tl.constexpr, out_line: tl.constexpr, out_first: tl.constexpr,
    patch: tl.constexpr, outputs: tl.constexpr, both: tl.constexpr, tile_rows: tl.constexpr, depth: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tiles:
        row = tile * tile_rows + tl.arange(0, tile_rows)
        _forward_tile(
            frames, weights, online_bias, target_bias, out, row, batch, 0, 0, 1, weight_step,
            image, positions, out_width, right, down, run, line, plane_entries, plane,
            out_image, out_line, out_first, patch, outputs, tile_rows, depth, form,
        )  # fmt: skip
    else:
        row = (tile - tiles) * tile_rows + tl.arange(0, tile_rows)
        _forward_tile(
            next_frames, weights, online_bias, target_bias, out, row, batch, batch,
            0 if both else 1, 2 if both else 1, weight_step,
            image, positions, out_width, right, down, run, line, plane_entries, plane,
            out_image, out_line, out_first, patch, outputs, tile_rows, depth, form,
        )  # fmt: skip


@triton.jit
def _weight_kernel(
    frames, upstream, weight_out, bias_out, cells, positions, weight_step, bias_step,
    image: tl.constexpr, line: tl.constexpr, plane: tl.constexpr, pixel: tl.constexpr,
    outputs: tl.constexpr, patch: tl.constexpr, kernel: tl.constexpr, stride: tl.constexpr,
    out_height: tl.constexpr, out_width: tl.constexpr, cell_rows: tl.constexpr, cell_columns: tl.constexpr,
    rounds: tl.constexpr, bias_rounds: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, depth: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    taps: tl.constexpr = kernel // stride
    run: tl.constexpr = stride * pixel
    if tile < taps * taps * outputs // tile_rows:
        column = tile * tile_rows + tl.arange(0, tile_rows)
        output, tap_y, tap_x = column % outputs, column // outputs // taps, column // outputs % taps
        entry = entries(0, tile_columns, run, line, stride * run, plane)
        total = tl.zeros((tile_rows, tile_columns), tl.float32)
        for turn in range(rounds):
            cell = (split * rounds + turn) * depth + tl.arange(0, depth)
            safe = tl.minimum(cell, cells - 1)
            batch_item, within = safe // (cell_rows * cell_columns), safe % (cell_rows * cell_columns)
            cell_y, cell_x = within // cell_columns, within % cell_columns
            start = batch_item * image + (cell_y * line + cell_x * pixel) * stride
            values = tl.load(frames + start[:, None] + entry[None, :])
            y, x = cell_y[:, None] - tap_y[None, :], cell_x[:, None] - tap_x[None, :]
            seen = (cell < cells)[:, None] & (y >= 0) & (y < out_height) & (x >= 0) & (x < out_width)
            position = (batch_item[:, None] * out_height + y) * out_width + x
            gradient = tl.load(upstream + position * outputs + output[None, :], mask=seen, other=0.0)
            total = tl.dot(tl.trans(gradient), operand(values, gradient.dtype), total, input_precision=form)
        # the entries of the cell at each tap, as numbers within a patch
        number = entries(0, tile_columns, run, kernel * pixel, stride * run, kernel * kernel)[None, :]
        number += ((tap_y * kernel + tap_x) * run)[:, None]
        place = split * weight_step + output[:, None] * patch + number
        tl.store(weight_out + place, total * (1 / 255))
    else:
        every = tl.arange(0, outputs)
        bias = column_sum(upstream, split * bias_rounds * depth, positions, every, outputs, bias_rounds, outputs, depth)
        tl.store(bias_out + split * bias_step + every, bias)
