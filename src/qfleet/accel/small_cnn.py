"""The small convolutional network's values and gradients by hand-written kernels: few launches for small batches.

One gradient is five launches: the features of a minibatch, gathered from its rows; the dense layer, the loss, and back
to the dense layer's outputs; the gradients of its weights and of the features; the convolution's gradients; the sum of
all that programs left in parts. Weights are read, and gradients written, where the flat parameters have them. Nothing
waits for the device, and every sum has a fixed order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qfleet.accel.kernels.launch import available, require_dense
from qfleet.accel.kernels.small_cnn import Samples, rounds_for
from qfleet.accel.kernels.small_cnn_back import conv_back, dense_back
from qfleet.accel.kernels.small_cnn_dense import Slopes, learn, values
from qfleet.accel.kernels.small_cnn_fold import Sums, fold
from qfleet.accel.nature_layout import layers_of
from qfleet.accel.precision import Precision
from qfleet.accel.small_cnn_layout import SmallCnnLayout, numbers, places, shape_of, start
from qfleet.accel.small_cnn_tiles import SmallCnnTiles, tiles_for
from qfleet.algo import inputs
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import DeepAgent, Replayed
from qfleet.algo.networks import QNetwork
from qfleet.algo.rollouts import RolloutTensors
from qfleet.algo.targets import bellman, greedy
from qfleet.algo.torsos import Torso
from qfleet.core.spec import PLAIN
from qfleet.core.tensors import TensorBatch

_KINDS = [nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.Linear, nn.LayerNorm, nn.ReLU, nn.Linear]
"""The layers of the network. The types are exact: a layer with a spectral norm is of a subclass."""
_OUTPUTS, _UNITS = (16, 32, 64), (64, 128, 256, 512)
"""Channels and units that kernels have blocks for."""
_LARGEST = 128
"""Positions of an image, and weights of a patch, that fit one block."""
_ROWS = 8192
"""Observations that are valued at a time: their features stay in a GPU's cache."""


def supports(network: QNetwork, agent: DeepAgent, device: torch.device) -> bool:
    """Return whether this file can do the network's work: `SmallCnnConfig` with norms on one image, plain values."""
    if device.type != "cuda" or not available():
        return False
    soft = isinstance(agent, ReplayAgent) and agent.munchausen is not None
    return not agent.dueling and not soft and _fits(network)


def _fits(network: QNetwork) -> bool:
    if [type(layer) for layer in layers_of(network)] != _KINDS:
        return False
    assert isinstance(network.torso, Torso)
    stages, leaves = list(network.torso.inputs.stages), network.torso.inputs.shapes
    if list(leaves) != [PLAIN] or len(leaves[PLAIN]) != 3 or type(stages[0]) not in (inputs._Pixels, inputs._Numbers):
        return False
    shape = shape_of(network)
    blocks = shape.outputs in _OUTPUTS and shape.units in _UNITS and max(shape.positions, shape.patch) <= _LARGEST
    return blocks and leaves[PLAIN][0] == shape.channels  # a smaller last axis would be the channels


class SmallCnnForward:
    """The values of a network that `supports` accepts. Make it after the network's `FlatParameters`."""

    def __init__(self, network: QNetwork, precision: Precision = "bf16", tiles: SmallCnnTiles | None = None) -> None:
        """Take `tiles` in place of those for the batch size."""
        self._network, self._tiles = SmallCnnLayout(network, precision), tiles

    @torch.no_grad()
    def q(self, observation: dict[str, Tensor]) -> Tensor:
        """Return the values [B, A] of raw leaves [B, ...]."""
        network, images = self._network, numbers(observation[PLAIN])
        q = torch.empty(len(images), network.shape.actions, device=images.device)
        for first in range(0, len(images), _ROWS):
            some = images[first : first + _ROWS]
            tiles = self._tiles or tiles_for(len(some), network.shape)
            features = network.features(some, None, len(some), tiles)
            layers = (network.dense, network.last, network.parts(len(some), tiles))
            values(network.shape, tiles.dense, features, *layers, q[first : first + _ROWS], network.form)
        return q


class SmallCnnGradient:
    """The gradient of a network that `supports` accepts; equal to `EagerGradient` but for rounding.

    Make it after the `FlatParameters` of both networks. It also gathers a minibatch's rows itself: see `regression_of`.
    """

    def __init__(
        self,
        agent: DeepAgent,
        flat: FlatParameters,
        online: QNetwork,
        target: QNetwork | None,
        precision: Precision = "bf16",
        tiles: SmallCnnTiles | None = None,
    ) -> None:
        """Take `tiles` in place of those for the batch size."""
        self._agent, self._gradients, self._tiles = agent, flat.gradients, tiles
        self._network = network = SmallCnnLayout(online, precision)
        self._threshold = agent.huber_threshold if agent.loss == "huber" else math.inf
        self._online = SmallCnnForward(online, precision, tiles)
        self._target = None if target is None else SmallCnnForward(target, precision, tiles)
        conv, dense, last = network.conv, network.dense, network.last
        self._conv_places = places(flat, *conv)
        self._dense_places = places(flat, *last, dense.norm_weight, dense.norm_bias, dense.bias)
        self._dense_weight = flat.gradients[start(flat, dense.weight) :][: dense.weight.numel()]

    @torch.no_grad()
    def replay(self, batch: TensorBatch) -> Replayed:
        """Take the loss of a batch of replayed transitions."""
        assert isinstance(self._agent, ReplayAgent)
        assert self._target is not None
        following = self._target.q(batch.next_observation)
        choosing = self._online.q(batch.next_observation) if self._agent.double else following
        goal = bellman(batch.reward, batch.discount, greedy(following, choosing, batch.next_mask))
        samples = Samples(numbers(batch.observation[PLAIN]), None, batch.action, goal, batch.weight)
        divisor = torch.full((), float(batch.size), device=goal.device)
        error = torch.empty_like(goal)
        metrics = self._fill(samples, len(goal), divisor, error)
        return Replayed(metrics[0], error.abs(), {"q_mean": (goal + error).mean()})

    def regression(
        self, observation: dict[str, Tensor], action: Tensor, goal: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take the mean error of the values of the actions [B] against the goals [B]; return it and the mean value."""
        return self._regression(Samples(numbers(observation[PLAIN]), None, action, goal, weight), len(action))

    def regression_of(self, data: RolloutTensors, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Do as `regression` for the rows `chosen` [B] of a rollout, read where they lie."""
        images = numbers(data.observation[PLAIN])
        return self._regression(Samples(images, chosen, data.action, data.goal, data.weight), len(chosen))

    @torch.no_grad()
    def _regression(self, samples: Samples, batch: int) -> tuple[Tensor, Tensor]:
        metrics = self._fill(samples, batch, None, None)
        return metrics[0], metrics[1]

    def _fill(self, samples: Samples, batch: int, divisor: Tensor | None, error: Tensor | None) -> Tensor:
        """Fill the flat gradient; return mean error and mean value [2]. The sum of weights is the default `divisor`."""
        network, device = self._network, self._gradients.device
        require_dense(*(tensor for tensor in samples if tensor is not None))
        if batch == 0:  # a rollout may have fewer valid ticks than minibatches
            self._gradients.zero_()
            return torch.zeros(2, device=device)
        shape, form = network.shape, network.form
        tiles = self._tiles or tiles_for(batch, shape)
        summed = None
        if divisor is None:
            divisor = summed = torch.empty((), device=device)
        features = network.features(samples.images, samples.chosen, batch, tiles, samples.weight, summed)
        blocks, each = -(-batch // tiles.dense.rows), rounds_for(batch, tiles.conv_programs)
        slopes = Slopes(
            dense=torch.empty(batch, shape.units, dtype=features.dtype, device=device),
            sums=torch.empty(blocks, shape.dense_sums, device=device),
            terms=torch.empty(blocks, 2, device=device),
            error=error,
        )
        layers = (network.dense, network.last, network.parts(batch, tiles))
        learn(shape, tiles.dense, features, *layers, samples, divisor, self._threshold, slopes, form)
        upstream = torch.empty_like(features)
        results = (self._dense_weight, upstream)
        dense_back(shape, tiles.weight, tiles.input, features, slopes.dense, network.dense.weight, *results, form)
        sums = torch.empty(-(-batch // each), shape.conv_sums, device=device)
        conv_back(shape, network.conv, samples.images, samples.chosen, upstream, sums, form, each, tiles.conv_warps)
        metrics = torch.empty(2, device=device)
        dense_sums, conv_sums = Sums(slopes.sums, self._dense_places), Sums(sums, self._conv_places)
        fold(dense_sums, conv_sums, slopes.terms, self._gradients, metrics)
        return metrics
