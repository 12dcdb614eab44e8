"""The layers and losses of small dense networks with torch's operations: forwards, and backwards by hand.

A layer keeps what its backward pass needs in memory that is used again; that pass may have fewer rows, the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.gradients import DeepAgent
from qfleet.algo.targets import bellman, greedy, pick
from qfleet.core.tensors import TensorBatch
from qfleet.core.types import Floats

_NARROW = range(2, 16)
"""Numbers of inputs for which the matrix library computes a weight's gradient several times faster as its transpose."""
_relu_backward = torch.ops.aten.threshold_backward.grad_input
_norm_backward = torch.ops.aten.native_layer_norm_backward.default


class Matrix(NamedTuple):
    """The same memory in three forms: to make a view costs as much as a small operation on it."""

    tensor: Tensor
    transposed: Tensor
    array: Floats


class Rows:
    """Scratch memory: a matrix [rows, width] for any number of rows; fewer rows are the first ones of more."""

    def __init__(self, width: int) -> None:
        self._whole = torch.empty(0, width)
        self._views: dict[int, Matrix] = {}

    def __call__(self, rows: int) -> Matrix:
        """Return the first rows; what they hold stays as long as no more rows are asked for than ever before."""
        view = self._views.get(rows)
        if view is None:
            if rows > len(self._whole):
                self._whole = torch.empty(rows, self._whole.shape[1])
                self._views.clear()
            tensor = self._whole[:rows]
            view = self._views[rows] = Matrix(tensor, tensor.t(), tensor.numpy())
        return view


class Layer:
    """A linear layer, with normalisation and ReLU where the network has them, on the network's own weights."""

    def __init__(self, block: Sequence[nn.Module], inputs: Rows, input_slope: Rows) -> None:
        """Take the outputs of the layer before, and where the slope of the loss in them goes."""
        linear = block[0]
        assert isinstance(linear, nn.Linear)
        self.weight, self.bias = linear.weight.detach(), linear.bias.detach()
        self.weight_slope, self.bias_slope = _slope(linear.weight), _slope(linear.bias)
        self.transposed = self.weight.t()
        self.norm = next((Norm(module) for module in block if isinstance(module, nn.LayerNorm)), None)
        self.hidden = len(block) > 1
        self.inputs, self.outputs = inputs, Rows(linear.out_features)
        self.input_slope, self.slope = input_slope, Rows(linear.out_features)
        self._narrow = torch.empty(*self.transposed.shape) if linear.in_features in _NARROW else None

    def forward(self, rows: int) -> None:
        """Compute the outputs of the first rows of the inputs."""
        outputs = self.outputs(rows).tensor
        if self.norm is not None:
            torch.addmm(self.bias, self.inputs(rows).tensor, self.transposed, out=self.norm.inputs(rows).tensor)
            self.norm.forward(rows, outputs)
            return
        torch.addmm(self.bias, self.inputs(rows).tensor, self.transposed, out=outputs)
        if self.hidden:
            outputs.relu_()

    def backward(self, rows: int) -> None:
        """Fill the gradients for the slope of the first rows of the outputs; it becomes that of the product."""
        slope = self.slope(rows).tensor
        if self.hidden:
            _relu_backward(slope, self.outputs(rows).tensor, 0, grad_input=slope)
        if self.norm is not None:
            self.norm.backward(rows, slope)
        torch.sum(slope, 0, out=self.bias_slope)
        self.fill_weight_slope(rows)

    def fill_weight_slope(self, rows: int) -> None:
        """Fill the weight's gradient for the slope of the product."""
        slope, inputs = self.slope(rows), self.inputs(rows)
        if self._narrow is None:
            torch.mm(slope.transposed, inputs.tensor, out=self.weight_slope)
        else:
            self.weight_slope.copy_(torch.mm(inputs.transposed, slope.tensor, out=self._narrow).t())

    def pass_back(self, rows: int, add: bool = False) -> None:
        """Fill the slope of the inputs for that of the product, or add to it."""
        slope, result = self.slope(rows).tensor, self.input_slope(rows).tensor
        if add:
            result.addmm_(slope, self.weight)
        else:
            torch.mm(slope, self.weight, out=result)


class Norm:
    """Layer normalisation and ReLU."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        self.weight, self.bias = norm.weight.detach(), norm.bias.detach()
        self.weight_slope, self.bias_slope = _slope(norm.weight), _slope(norm.bias)
        self.shape, self.eps = norm.normalized_shape, norm.eps
        self.inputs = Rows(len(self.weight))

    def forward(self, rows: int, outputs: Tensor) -> None:
        """Write the result for the first rows of `inputs` to `outputs` [rows, width]."""
        # These operations make new tensors: their forms that write to given ones are slower, being copies of them.
        result, self._mean, self._rate = torch.native_layer_norm(
            self.inputs(rows).tensor, self.shape, self.weight, self.bias, self.eps
        )
        torch.clamp_min(result, 0, out=outputs)

    def backward(self, rows: int, slope: Tensor) -> None:
        """Fill the gradients for the slope [rows, width] of the normalised values; it becomes that of the inputs."""
        slopes: tuple[Tensor, Tensor, Tensor] = _norm_backward(
            slope,
            self.inputs(rows).tensor,
            self.shape,
            self._mean[:rows],
            self._rate[:rows],
            self.weight,
            self.bias,
            (True, True, True),
        )
        slope.copy_(slopes[0])
        self.weight_slope.copy_(slopes[1])
        self.bias_slope.copy_(slopes[2])


def replay_slope(
    agent: ReplayAgent, values: Tensor, choice: Tensor, following: Tensor, batch: TensorBatch, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the slope [B, A] of the batch's loss in the online network's values [B, A] of its observations.

    The next action is the best in the last B rows of `choice` [N, A], valued by the target's values `following` [B, A].
    Return the loss, the sizes [B] of the errors and the mean value.
    """
    value = pick(values, batch.action)
    best = greedy(following, choice[-len(batch.action) :], batch.next_mask)
    error = value - bellman(batch.reward, batch.discount, best)
    total = _fill(agent, batch.action, error, batch.weight / batch.size, slope)
    return total, error.abs_(), value.mean()


def regression_slope(
    agent: DeepAgent, values: Tensor, action: Tensor, goal: Tensor, weight: Tensor | None, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill the slope [B, A] of the mean error of the actions' values [B, A]; return that error and the mean value."""
    if weight is None:
        share = torch.full_like(goal, 1 / max(len(goal), 1))
    else:
        share = weight / weight.sum().clamp_(min=1)
    value = pick(values, action)
    return _fill(agent, action, value - goal, share, slope), torch.dot(value, share)


def _fill(agent: DeepAgent, action: Tensor, error: Tensor, share: Tensor, slope: Tensor) -> Tensor:
    """Fill the slope [B, A] for the actions' errors [B], each times its share [B]; return the loss."""
    own = error.clamp(-agent.huber_threshold, agent.huber_threshold) if agent.loss == "huber" else error
    shared = own * share
    slope.zero_().scatter_(1, action.unsqueeze(1), shared.unsqueeze(1))
    # Both losses are own * (error - own / 2): half the square up to the threshold, the line beyond it.
    return torch.dot(shared, torch.add(error, own, alpha=-0.5))


def _slope(parameter: Tensor) -> Tensor:
    """Return the part of the flat gradient that belongs to a parameter."""
    assert parameter.grad is not None, "the network has no FlatParameters"
    return parameter.grad
