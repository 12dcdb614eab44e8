"""The Triton programs behind `conv`: what they have in common with those of `frames`, and one for each product.

Distances and sides are constants of the compiled program, so that what a layer does not need leaves no trace in it.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def patch_start(
    row, image: tl.constexpr, positions: tl.constexpr, out_width: tl.constexpr, right: tl.constexpr,
    down: tl.constexpr,
):  # fmt: skip
    """Return where the patch of each output position begins."""
    position = row % positions
    return row // positions * image + position // out_width * down + position % out_width * right


@triton.jit
def stored_pixel(
    row, positions: tl.constexpr, out_width: tl.constexpr, out_image: tl.constexpr, out_line: tl.constexpr,
    out_first: tl.constexpr,
):  # fmt: skip
    """Return the pixel of the output tensor at which each output position lies."""
    if out_image == positions:
        return row
    else:
        return patch_start(row, out_image, positions, out_width, 1, out_line) + out_first


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
    share: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr, depth: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Return patches that begin at `start` times weights that begin at `column`, over `share` entries from `first`."""
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for done in range(0, share, depth):
        entry = entries(first + done, depth, run, line, plane_entries, plane)
        patches = tl.load(images + start[:, None] + entry[None, :])
        weight = tl.load(weights + column[None, :] + (first + done + tl.arange(0, depth))[:, None])
        total = tl.dot(operand(patches, weight.dtype), weight, total, input_precision=form)
    return total


@triton.jit
def forward_kernel(
    images, weights, online_bias, target_bias, out,
    rows, online_rows, online_tiles, weight_step,
    image: tl.constexpr, positions: tl.constexpr, out_width: tl.constexpr, right: tl.constexpr, down: tl.constexpr,
    run: tl.constexpr, line: tl.constexpr, plane_entries: tl.constexpr, plane: tl.constexpr,
    out_image: tl.constexpr, out_line: tl.constexpr, out_first: tl.constexpr,
    patch: tl.constexpr, outputs: tl.constexpr, share: tl.constexpr, partial: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, depth: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Write a block of positions times outputs of one network: finished, or a part of the sums."""
    tile, split = tl.program_id(0), tl.program_id(2)
    network = (tile >= online_tiles).to(tl.int32)
    row = network * online_rows + (tile - network * online_tiles) * tile_rows + tl.arange(0, tile_rows)
    end = tl.where(network == 0, online_rows, rows)
    start = patch_start(tl.minimum(row, end - 1), image, positions, out_width, right, down)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    total = product(
        images, weights + network * weight_step, start, column * patch, split * share,
        run, line, plane_entries, plane, share, tile_rows, tile_columns, depth, form,
    )  # fmt: skip
    pixel = stored_pixel(row, positions, out_width, out_image, out_line, out_first)
    place = pixel[:, None] * outputs + column[None, :]
    if partial:
        place += split * rows * outputs
    else:
        bias = tl.where(network == 0, tl.load(online_bias + column), tl.load(target_bias + column))
        total = tl.maximum(total + bias[None, :], 0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(row < end)[:, None])


@triton.jit
def input_kernel(
    upstream, weights, images, out, rows,
    height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, outputs: tl.constexpr,
    kernel: tl.constexpr, stride: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    padding_y: tl.constexpr, padding_x: tl.constexpr,
    cells: tl.constexpr, cell_columns: tl.constexpr, cell_top: tl.constexpr, cell_left: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, depth: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Write a block of the input's gradient: cells times the pixels and channels of a cell."""
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    image, cell = row // cells, row % cells
    cell_y, cell_x = cell // cell_columns + cell_top, cell % cell_columns + cell_left
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
        total = tl.dot(gradient, weight, total, input_precision=form)
    y = cell_y[:, None] * stride + pixel_y[None, :] - padding_y
    x_channel = cell_x[:, None] * (stride * channels) + across[None, :] - padding_x * channels
    inside = (row < rows)[:, None] & (y < height) & (x_channel < width * channels)
    if padding_y % stride > 0 or padding_x % stride > 0:  # the first cells lie partly in the padding
        inside &= (y >= 0) & (x_channel >= 0)
    stored_y = image[:, None] * (height + 2 * padding_y) + y + padding_y
    stored = stored_y * ((width + 2 * padding_x) * channels) + x_channel + padding_x * channels
    alive = tl.load(images + stored, mask=inside, other=0.0).to(tl.float32) > 0
    place = (image[:, None] * height + y) * (width * channels) + x_channel
    tl.store(out + place, tl.where(alive, total, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def weight_kernel(
    images, upstream, weight_out, bias_out,
    rows, weight_step, bias_step,
    image: tl.constexpr, positions: tl.constexpr, out_width: tl.constexpr, right: tl.constexpr, down: tl.constexpr,
    run: tl.constexpr, line: tl.constexpr, plane_entries: tl.constexpr, plane: tl.constexpr,
    patch: tl.constexpr, outputs: tl.constexpr, rounds: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, depth: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Write a part of the gradient of a block of weights; the last program of the first axis, that of the biases."""
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
            total = tl.dot(tl.trans(patches), gradient, total, input_precision=form)
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
