"""Small dense networks on a CPU, without the overhead of modules and automatic differentiation.

A small network's time goes into the number of operations as much as into their arithmetic. Here a layer is one matrix
product into memory that is used again, and gradients are written straight into the flat gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qfleet.accel.dense import Layer, Rows, regression_slope, replay_slope
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import DeepAgent, Replayed
from qfleet.algo.heads import ScalarHead
from qfleet.algo.inputs import Inputs
from qfleet.algo.networks import QNetwork
from qfleet.algo.torsos import Torso
from qfleet.core.tensors import TensorBatch
from qfleet.replay.sumtree import why_no_numba

_BLOCKS = ((nn.Linear,), (nn.Linear, nn.ReLU), (nn.Linear, nn.LayerNorm, nn.ReLU))
"""What a layer may be made of. The types are exact: a layer with a spectral norm is of a subclass."""


def supports(network: QNetwork, agent: DeepAgent) -> bool:
    """Return whether the network's work can be done here: dense ReLU layers and one value for each action, on a CPU."""
    if isinstance(agent, ReplayAgent) and agent.munchausen is not None:
        return False
    if not isinstance(network.torso, Torso) or not isinstance(network.head, ScalarHead):
        return False
    blocks = [block for modules in sequences(network) for block in split(modules)]
    known = {id(parameter) for block in blocks for module in block for parameter in module.parameters()}
    every = {id(parameter) for parameter in network.parameters() if parameter.device.type == "cpu"}
    return known == every and all(tuple(map(type, block)) in _BLOCKS for block in blocks)


class MlpForward:
    """The values of a network that `supports` accepts. Make it after the network's `FlatParameters`."""

    def __init__(self, network: QNetwork) -> None:
        self._network = ways().network(network)

    def q(self, observation: dict[str, Tensor]) -> Tensor:
        """Return the values [B, A] of raw leaves [B, ...], in memory that the next call overwrites."""
        return self._network.forward(observation)


class MlpGradient:
    """The gradient of a network that `supports` accepts; equal to `EagerGradient` but for rounding."""

    def __init__(self, agent: DeepAgent, flat: FlatParameters, online: QNetwork, target: QNetwork | None) -> None:
        self._agent, self._ways = agent, ways()
        self._online = self._ways.network(online)
        self._target = None if target is None else self._ways.network(target)

    def replay(self, batch: TensorBatch) -> Replayed:
        """Take the loss of a batch of replayed transitions."""
        assert isinstance(self._agent, ReplayAgent)
        assert self._target is not None
        rows, following = len(batch.action), self._target.forward(batch.next_observation)
        if self._agent.double:
            choice = self._online.forward(batch.observation, batch.next_observation)
            values = self._online.values(rows)
        else:
            choice, values = following, self._online.forward(batch.observation)
        slope = self._online.slope(rows)
        total, priority, mean = self._ways.replay_slope(self._agent, values, choice, following, batch, slope)
        self._online.backward(rows)
        return Replayed(total, priority, {"q_mean": mean})

    def regression(
        self, observation: dict[str, Tensor], action: Tensor, goal: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take the mean error of the values of the actions [B] against the goals [B]; return it and the mean value."""
        rows, values = len(action), self._online.forward(observation)
        slope = self._online.slope(rows)
        result = self._ways.regression_slope(self._agent, values, action, goal, weight, slope)
        self._online.backward(rows)
        return result


class SmallNetwork(Protocol):
    """The passes of one network; what `forward` returns stays until it is called again."""

    def forward(self, *observations: dict[str, Tensor]) -> Tensor:
        """Return the values [N, A] of equally long batches of raw leaves, one batch after the other."""

    def backward(self, rows: int) -> None:
        """Fill all gradients for the `slope` of the values of the first rows."""

    def values(self, rows: int) -> Tensor:
        """Return the values [rows, A] of the first rows."""

    def slope(self, rows: int) -> Tensor:
        """Return where the slope [rows, A] of the values of the first rows goes."""


class Ways(NamedTuple):
    """How networks and losses are computed; the losses are as in `accel.dense`."""

    network: Callable[[QNetwork], SmallNetwork]
    replay_slope: Callable[[ReplayAgent, Tensor, Tensor, Tensor, TensorBatch, Tensor], tuple[Tensor, Tensor, Tensor]]
    regression_slope: Callable[[DeepAgent, Tensor, Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]


def compiles_loops() -> bool:
    """Return whether loops are compiled here: numba may be used and torch's matrix library is found."""
    return not why_not_compiled()


def why_not_compiled() -> str:
    """Return what keeps loops from being compiled here; empty if nothing does."""
    if reason := why_no_numba():
        return reason
    from qfleet.accel.cpu_network import library

    return "" if library() is not None else "torch's matrix library is not found"


def ways() -> Ways:
    """Return compiled loops where there can be some, else torch's operations."""
    if compiles_loops():
        from qfleet.accel.cpu_network import COMPILED

        return COMPILED
    return Ways(_Network, replay_slope, regression_slope)


class _Network:
    """A network taken apart into layers: a trunk, and one or two streams that begin where it ends."""

    def __init__(self, network: QNetwork) -> None:
        assert isinstance(network.torso, Torso)
        self._prepare = Prepare(network.torso.inputs)
        trunk, *streams = sequences(network)
        # Nobody needs the slope of the inputs, but a network without a trunk has streams that ask where to put it.
        start = (self._prepare.rows, Rows(0))
        self._trunk = _layers(trunk, *start)
        features = (self._trunk[-1].outputs, self._trunk[-1].slope) if self._trunk else start
        self._streams = [_layers(modules, *features) for modules in streams]
        self._last = self._streams[0][-1]

    def forward(self, *observations: dict[str, Tensor]) -> Tensor:
        """Return the values [N, A] of equally long batches of raw leaves, one batch after the other."""
        rows = self._prepare(observations)
        for layers in (self._trunk, *self._streams):
            for layer in layers:
                layer.forward(rows)
        values = self.values(rows)
        if len(self._streams) == 2:
            state = self._streams[1][-1].outputs(rows).tensor
            values.sub_(values.mean(1, keepdim=True)).add_(state)
        return values

    def values(self, rows: int) -> Tensor:
        """Return the values [rows, A] of the first rows."""
        return self._last.outputs(rows).tensor

    def slope(self, rows: int) -> Tensor:
        """Return where the slope [rows, A] of the values of the first rows goes."""
        return self._last.slope(rows).tensor

    def backward(self, rows: int) -> None:
        """Fill all gradients for the `slope` of the values of the first rows."""
        if len(self._streams) == 2:
            slope, total = self.slope(rows), self._streams[1][-1].slope(rows).tensor
            torch.sum(slope, 1, keepdim=True, out=total)
            slope.sub_(total, alpha=1 / slope.shape[1])
        for number, layers in enumerate(self._streams):
            _backward(layers, rows)
            if self._trunk:
                layers[0].pass_back(rows, add=number > 0)
        _backward(self._trunk, rows)


class Prepare:
    """The input stage of a network: raw leaves to rows of numbers."""

    def __init__(self, inputs: Inputs) -> None:
        self.rows = Rows(sum(math.prod(shape) for shape in inputs.shapes.values()))
        self._stages = list(zip(inputs.shapes, inputs.stages, strict=True))
        (self._name, stage), *others = self._stages
        scale = getattr(stage, "scale", None)
        self._scale = scale if isinstance(scale, Tensor) and scale.ndim == 1 and not others else None

    def __call__(self, observations: Sequence[dict[str, Tensor]]) -> int:
        """Fill the rows with equally long batches of raw leaves, one batch after the other; return how many."""
        if self._scale is not None:  # the usual case
            parts = [leaves[self._name] for leaves in observations]
        else:
            parts = [_join([stage(leaves[name]).flatten(1) for name, stage in self._stages]) for leaves in observations]
        rows = len(parts) * len(parts[0])
        prepared = self.rows(rows).tensor
        if self._scale is None:
            torch.cat(parts, out=prepared)
        elif len(parts) == 1:
            torch.mul(parts[0], self._scale, out=prepared)
        else:
            torch.cat(parts, out=prepared).mul_(self._scale)
        return rows


def _backward(layers: Sequence[Layer], rows: int) -> None:
    """Fill the gradients of layers for the slope of the last one's outputs."""
    for layer in reversed(layers[1:]):
        layer.backward(rows)
        layer.pass_back(rows)
    for layer in layers[:1]:
        layer.backward(rows)


def sequences(network: QNetwork) -> list[nn.Sequential]:
    """Return the trunk, the stream of the advantages (or of the values) and, if dueling, that of the state's value."""
    assert isinstance(network.torso, Torso)
    assert isinstance(network.head, ScalarHead)
    streams = network.head.streams
    parts = (getattr(network.torso.body, "layers", None), streams.advantage, streams.value)
    return [part for part in parts if isinstance(part, nn.Sequential)]


def _layers(modules: Iterable[nn.Module], inputs: Rows, input_slope: Rows) -> list[Layer]:
    layers: list[Layer] = []
    for block in split(modules):
        layers.append(Layer(block, inputs, input_slope))
        inputs, input_slope = layers[-1].outputs, layers[-1].slope
    return layers


def split(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Return the modules in groups that each begin with a linear one."""
    blocks: list[list[nn.Module]] = []
    for module in modules:
        if isinstance(module, nn.Linear) or not blocks:
            blocks.append([])
        blocks[-1].append(module)
    return blocks


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
