"""The compiled loops of small dense networks: a whole gradient is one call.

Large matrix products are those of torch's own matrix library, called from here; all else are loops. Each inner loop
writes to few arrays: beyond that the compiler no longer proves that they are apart, and computes one number at a time.
Shapes: B rows, N inputs, M outputs, A actions, L layers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from qfleet.accel.compiled import FLOATS, INTS, MATRIX, compiled, part
from qfleet.core.types import Floats, Ints

FEW = 16
"""Below this many inputs or outputs a plain loop is faster than the matrix library."""
INPUTS, OUTPUTS, SOURCE, HIDDEN, NORMALISED, WEIGHT, BIAS, SCALE, SHIFT, VALUES, NORMAL, RATES, SLOPE, FIELDS = range(
    14
)
"""What a plan [L, FIELDS] says of a layer: its size; the layer that it reads, -1 for the observation; whether ReLU and,
before it, a normalisation follow; where its parameters are; where in memory its outputs, normalised values, rates and
slope are. The memory begins with room for FEW rows of the widest layer."""
Network = tuple[Ints, Floats, Floats, Floats, tuple[int, int]]
"""Plan, parameters, gradients, memory, and the layers of the values (or advantages) and of the state's value or -1."""
Library = tuple[Ints, Floats]
"""The address of the matrix library's product and room for its whole numbers [9]; 1 and 0."""

_NETWORK = f"Tuple((int64[:,::1],{FLOATS},{FLOATS},{FLOATS},UniTuple(int64,2)))"
_LIBRARY = f"Tuple(({INTS},{FLOATS}))"
_AS_IT_IS, _FLIPPED = ord("N"), ord("T")

# ---------------------------------------------------------------------------------------------------- matrix products


def _call_sgemm(
    context: Any, address: Any, flip_a: Any, flip_b: Any, m: Any, n: Any, k: Any, one: Any, a: Any, lda: Any, b: Any,
    ldb: Any, beta: Any, c: Any, ldc: Any,
) -> Any:  # fmt: skip
    """Call the function at an address; all else are the addresses of its arguments."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer] * (len(values) - 1))
        arguments = [builder.inttoptr(value, pointer) for value in values[1:]]
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), arguments)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 14), generate


_sgemm: Any = intrinsic(_call_sgemm)


@part
def _multiply(
    library: Library,
    shape: tuple[int, int, int],
    flips: tuple[int, int],
    a: Floats,
    b: Floats,
    c: Floats,
    add: bool,
) -> None:
    """Compute c = a b, or add to c; the library sees all of them with their axes exchanged."""
    words, numbers = library
    words[1], words[2], words[3] = shape
    words[4], words[5] = flips
    words[6], words[7], words[8] = a.shape[1], b.shape[1], c.shape[1]
    word, one = words.ctypes.data, numbers.ctypes.data
    _sgemm(
        words[0], word + 32, word + 40, word + 8, word + 16, word + 24, one, a.ctypes.data, word + 48,
        b.ctypes.data, word + 56, one if add else one + 4, c.ctypes.data, word + 64,
    )  # fmt: skip


@part
def _from_few(inputs: Floats, weight: Floats, flipped: Floats, outputs: Floats) -> None:
    """Write the product of few inputs [B, N] and a weight [M, N] to `outputs` [B, M]; `flipped` [FEW, M] is scratch."""
    size = inputs.shape[1]
    for k in range(FEW):
        for j in range(len(weight)):
            flipped[k, j] = weight[j, k] if k < size else np.float32(0)
    outputs[:] = 0
    for i in range(len(inputs)):
        row, given = outputs[i], inputs[i]
        for k in range(0, size, 4):
            # Beyond the last input any will do: its weight is 0.
            first, second = given[k], given[min(k + 1, size - 1)]
            third, fourth = given[min(k + 2, size - 1)], given[min(k + 3, size - 1)]
            weights = flipped[k : k + 4]
            for j in range(len(row)):
                pair = first * weights[0, j] + second * weights[1, j]
                row[j] += pair + third * weights[2, j] + fourth * weights[3, j]


@part
def _to_few(inputs: Floats, weight: Floats, outputs: Floats) -> None:
    """Write the product of inputs [B, N] and a weight [M, N] to few `outputs` [B, M]."""
    for i in range(len(inputs)):
        row = inputs[i]
        for j in range(len(weight)):
            weights, total = weight[j], np.float32(0)
            for k in range(len(row)):
                total += row[k] * weights[k]
            outputs[i, j] = total


@part
def _weight_from_few(slope: Floats, inputs: Floats, flipped: Floats, weight_slope: Floats) -> None:
    """Fill the gradient [M, N] for the slope [B, M] of a product with few inputs [B, N]; `flipped` is scratch."""
    size = inputs.shape[1]
    flipped[:size] = 0
    for i in range(len(slope)):
        row = slope[i]
        for k in range(size):
            value, sums = inputs[i, k], flipped[k]
            for j in range(len(row)):
                sums[j] += value * row[j]
    for j in range(len(weight_slope)):
        for k in range(size):
            weight_slope[j, k] = flipped[k, j]


@part
def _weight_to_few(slope: Floats, inputs: Floats, weight_slope: Floats) -> None:
    """Fill the gradient [M, N] for the slope [B, M] of few outputs of inputs [B, N]."""
    weight_slope[:] = 0
    for i in range(len(slope)):
        row = inputs[i]
        for j in range(len(weight_slope)):
            value, sums = slope[i, j], weight_slope[j]
            if value != 0:  # most are: a loss touches one action of each sample
                for k in range(len(row)):
                    sums[k] += value * row[k]


@part
def _pass_to_few(slope: Floats, weight: Floats, input_slope: Floats, add: bool) -> None:
    """Fill the slope [B, N] of the inputs for that of few outputs [B, M], or add to it."""
    for i in range(len(slope)):
        row = input_slope[i]
        if not add:
            row[:] = 0
        for j in range(len(weight)):
            value, weights = slope[i, j], weight[j]
            if value != 0:
                for k in range(len(row)):
                    row[k] += value * weights[k]


# ------------------------------------------------------------------------------------------- what follows the products


@part
def _add_bias(values: Floats, bias: Floats, relu: bool) -> None:
    """Add the bias [M] to each row of `values` [B, M]; with `relu`, what is below 0 becomes 0."""
    for i in range(len(values)):
        row = values[i]
        if relu:
            for j in range(len(row)):
                value = row[j] + bias[j]
                row[j] = np.float32(0) if value <= 0 else value
        else:
            for j in range(len(row)):
                row[j] += bias[j]


@part
def _normalise(
    values: Floats, bias: Floats, scale: Floats, shift: Floats, eps: float, rates: Floats, outputs: Floats
) -> None:
    """Write ReLU of the layer normalisation of `values` [B, M] plus bias [M] to `outputs` [B, M].

    What is left in `values` is normalised but not yet scaled and shifted; `rates` [B] are what it was multiplied by.
    """
    width = np.float32(values.shape[1])
    for i in range(len(values)):
        row, result = values[i], outputs[i]
        total, squares = np.float32(0), np.float32(0)
        for j in range(len(row)):
            row[j] += bias[j]
            total += row[j]
        mean = total / width
        for j in range(len(row)):
            squares += (row[j] - mean) * (row[j] - mean)
        rates[i] = rate = np.float32(1) / np.sqrt(squares / width + eps)
        for j in range(len(row)):
            value = (row[j] - mean) * rate
            row[j] = value
            scaled = value * scale[j] + shift[j]
            result[j] = np.float32(0) if scaled <= 0 else scaled


@part
def _pass_bias(slope: Floats, outputs: Floats, bias_slope: Floats, relu: bool) -> None:
    """Turn the slope [B, M] of `_add_bias`'s outputs into that of what it was given; fill the bias's gradient [M]."""
    bias_slope[:] = 0
    for i in range(len(slope)):
        row, output = slope[i], outputs[i]
        if relu:
            for j in range(len(row)):
                value = np.float32(0) if output[j] <= 0 else row[j]
                row[j] = value
                bias_slope[j] += value
        else:
            for j in range(len(row)):
                bias_slope[j] += row[j]


@part
def _pass_normalise(
    slope: Floats,
    outputs: Floats,
    values: Floats,
    rates: Floats,
    scale: Floats,
    scale_slope: Floats,
    shift_slope: Floats,
    bias_slope: Floats,
) -> None:
    """Turn the slope [B, M] of `_normalise`'s outputs into that of what it was given; fill all gradients [M]."""
    width = np.float32(slope.shape[1])
    scale_slope[:] = 0
    shift_slope[:] = 0
    bias_slope[:] = 0
    for i in range(len(slope)):
        row, output, value = slope[i], outputs[i], values[i]
        for j in range(len(row)):
            passed = np.float32(0) if output[j] <= 0 else row[j]
            row[j] = passed
            shift_slope[j] += passed
        total, along = np.float32(0), np.float32(0)
        for j in range(len(row)):
            scale_slope[j] += row[j] * value[j]
            scaled = row[j] * scale[j]
            row[j] = scaled
            total += scaled
            along += scaled * value[j]
        mean, share, rate = total / width, along / width, rates[i]
        for j in range(len(row)):
            passed = (row[j] - mean - value[j] * share) * rate
            row[j] = passed
            bias_slope[j] += passed


# ------------------------------------------------------------------------------------------------------------ networks


@part
def block(memory: Floats, start: int, rows: int, columns: int) -> Floats:
    """Return the matrix [rows, columns] that begins at a place in memory."""
    return memory[start : start + rows * columns].reshape(rows, columns)


@part
def _forward_layer(
    layer: Ints, parameters: Floats, memory: Floats, inputs: Floats, eps: float, library: Library
) -> None:
    rows, size, width, hidden = len(inputs), layer[INPUTS], layer[OUTPUTS], layer[HIDDEN] == 1
    weight = block(parameters, layer[WEIGHT], width, size)
    bias = parameters[layer[BIAS] : layer[BIAS] + width]
    outputs = block(memory, layer[VALUES], rows, width)
    normalised = layer[NORMALISED] == 1
    product = block(memory, layer[NORMAL], rows, width) if normalised else outputs
    if size < FEW:
        _from_few(inputs, weight, block(memory, 0, FEW, width), product)
    elif width < FEW:
        _to_few(inputs, weight, product)
    else:
        _multiply(library, (width, rows, size), (_FLIPPED, _AS_IT_IS), weight, inputs, product, False)
    if normalised:
        scale = parameters[layer[SCALE] : layer[SCALE] + width]
        shift = parameters[layer[SHIFT] : layer[SHIFT] + width]
        _normalise(product, bias, scale, shift, eps, memory[layer[RATES] : layer[RATES] + rows], outputs)
    else:
        _add_bias(outputs, bias, hidden)


@compiled(_NETWORK, MATRIX, FLOATS, _LIBRARY)
def forward(network: Network, inputs: Floats, eps: Floats, library: Library) -> None:
    """Compute the outputs of all layers for prepared observations [B, N]; those of the values' layer are the values.

    `eps` [L] belongs to the normalisations.
    """
    plan, parameters, _, memory, (ends, states) = network
    rows = len(inputs)
    for number in range(len(plan)):
        layer = plan[number]
        source = layer[SOURCE]
        given = inputs if source < 0 else block(memory, plan[source, VALUES], rows, layer[INPUTS])
        _forward_layer(layer, parameters, memory, given, eps[number], library)
    if states >= 0:
        values = block(memory, plan[ends, VALUES], rows, plan[ends, OUTPUTS])
        state = block(memory, plan[states, VALUES], rows, 1)
        for i in range(rows):
            row, total = values[i], np.float32(0)
            for a in range(len(row)):
                total += row[a]
            for a in range(len(row)):
                row[a] += state[i, 0] - total / np.float32(len(row))


@part
def _backward_layer(
    layer: Ints, parameters: Floats, gradients: Floats, memory: Floats, inputs: Floats, library: Library
) -> None:
    """Fill the gradients of one layer for the slope of its outputs, which becomes that of its product."""
    rows, size, width = len(inputs), layer[INPUTS], layer[OUTPUTS]
    slope, outputs = block(memory, layer[SLOPE], rows, width), block(memory, layer[VALUES], rows, width)
    bias_slope = gradients[layer[BIAS] : layer[BIAS] + width]
    if layer[NORMALISED] == 1:
        start, shift = layer[SCALE], layer[SHIFT]
        slopes = gradients[start : start + width], gradients[shift : shift + width], bias_slope
        values, rates = block(memory, layer[NORMAL], rows, width), memory[layer[RATES] : layer[RATES] + rows]
        _pass_normalise(slope, outputs, values, rates, parameters[start : start + width], *slopes)
    else:
        _pass_bias(slope, outputs, bias_slope, layer[HIDDEN] == 1)
    weight_slope = block(gradients, layer[WEIGHT], width, size)
    if size < FEW:
        _weight_from_few(slope, inputs, block(memory, 0, FEW, width), weight_slope)
    elif width < FEW:
        _weight_to_few(slope, inputs, weight_slope)
    else:
        _multiply(library, (size, width, rows), (_AS_IT_IS, _FLIPPED), inputs, slope, weight_slope, False)


@compiled(_NETWORK, MATRIX, _LIBRARY)
def backward(network: Network, inputs: Floats, library: Library) -> None:
    """Fill all gradients for the slope of the values of prepared observations [B, N], the first of those forwarded."""
    plan, parameters, gradients, memory, (ends, states) = network
    rows = len(inputs)
    if states >= 0:
        slope, state = block(memory, plan[ends, SLOPE], rows, plan[ends, OUTPUTS]), plan[states, SLOPE]
        for i in range(rows):
            row, total = slope[i], np.float32(0)
            for a in range(len(row)):
                total += row[a]
            for a in range(len(row)):
                row[a] -= total / np.float32(len(row))
            memory[state + i] = total
    for number in range(len(plan) - 1, -1, -1):
        layer = plan[number]
        source, size, width = layer[SOURCE], layer[INPUTS], layer[OUTPUTS]
        given = inputs if source < 0 else block(memory, plan[source, VALUES], rows, size)
        _backward_layer(layer, parameters, gradients, memory, given, library)
        if source >= 0:
            slope, result = block(memory, layer[SLOPE], rows, width), block(memory, plan[source, SLOPE], rows, size)
            weight = block(parameters, layer[WEIGHT], width, size)
            add = False
            for later in range(number + 1, len(plan)):
                add |= plan[later, SOURCE] == source  # another stream was here before
            if width < FEW:
                _pass_to_few(slope, weight, result, add)
            else:
                _multiply(library, (size, rows, width), (_AS_IT_IS, _AS_IT_IS), weight, slope, result, add)


# -------------------------------------------------------------------------------------------------------------- losses


@part
def _limited(error: float, threshold: float) -> float:
    """Return the slope of an error's Huber loss; an infinite threshold makes it that of half the square."""
    return min(max(error, -threshold), threshold) if math.isfinite(error) else error


@compiled(*[MATRIX] * 3, INTS, *[FLOATS] * 3, "float32", "float32", MATRIX, FLOATS, FLOATS)
def replay_loss(
    values: Floats,
    choice: Floats,
    following: Floats,
    action: Ints,
    reward: Floats,
    discount: Floats,
    weight: Floats,
    size: float,
    threshold: float,
    slope: Floats,
    priority: Floats,
    sums: Floats,
) -> None:
    """Fill the slope [B, A] of the loss in the values [B, A], the sizes [B] of errors, and loss and mean value [2].

    The next action is the best in `choice` [B, A], valued by `following` [B, A].
    """
    slope[:] = 0
    total, mean = 0.0, 0.0
    for i in range(len(action)):
        best = 0
        for a in range(1, choice.shape[1]):
            if choice[i, a] > choice[i, best]:
                best = a
        error = values[i, action[i]] - (reward[i] + discount[i] * following[i, best])
        own = _limited(error, threshold)
        slope[i, action[i]] = shared = own * (weight[i] / size)
        priority[i] = abs(error)
        # Both losses are own * (error - own / 2): half the square up to the threshold, the line beyond it.
        total += shared * (error - own / 2)
        mean += values[i, action[i]]
    sums[0], sums[1] = total, mean / max(len(action), 1)


@compiled(MATRIX, INTS, FLOATS, FLOATS, "float32", MATRIX, FLOATS)
def regression_loss(
    values: Floats, action: Ints, goal: Floats, weight: Floats, threshold: float, slope: Floats, sums: Floats
) -> None:
    """Fill the slope [B, A] of the mean error, weighted by `weight` [B], and that error and the mean value [2]."""
    slope[:] = 0
    size, total, mean = 0.0, 0.0, 0.0
    for i in range(len(weight)):
        size += weight[i]
    for i in range(len(action)):
        share = np.float32(weight[i] / max(size, 1.0))
        value = values[i, action[i]]
        error = value - goal[i]
        own = _limited(error, threshold)
        slope[i, action[i]] = own * share
        total += own * share * (error - own / 2)
        mean += share * value
    sums[0], sums[1] = total, mean
