"""The Nature network's gradients by hand-written kernels: few launches for small batches, few bytes for large ones.

One update of a replay agent is sixteen launches, whatever the batch size:

1. Packing: both networks' float32 weights become operands of the products, in their layout and number format.
2. Values: three convolutions, the dense layer and the last layer. The online network sees states and next states, the
   target network next states, in the same launches.
3. The loss: from the values to their gradient.
4. The chain of input gradients, from the last layer down. The gradients of the weights hang off that chain and run
   beside it on a second stream. The last launch adds their partial sums and writes the flat gradient.

Where convolutions see zeros beyond an image's edges, memory has them around the image: states and next states are first
copied into such memory, one launch each, and what lies between two layers is made so.

All memory is allocated at the first use of a batch size. Nothing waits for the device, and every sum has a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qfleet.accel.kernels.conv import conv_backward_input, conv_backward_weight, conv_forward, conv_partials
from qfleet.accel.kernels.frames import frames_backward_weight, frames_forward
from qfleet.accel.kernels.head import head_backward, head_forward
from qfleet.accel.kernels.losses import Outputs, regression_gradient, scalar_gradient
from qfleet.accel.kernels.packing import fold, pack
from qfleet.accel.nature_buffers import NatureBuffers
from qfleet.accel.nature_layout import NatureLayout, flat_view, layers_of, parts_of
from qfleet.accel.nature_tiles import NatureTiles, tiles_for
from qfleet.accel.precision import Precision
from qfleet.algo import inputs
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import DeepAgent, Replayed
from qfleet.algo.networks import QNetwork
from qfleet.algo.targets import pick
from qfleet.algo.torsos import Torso
from qfleet.core.spec import PLAIN
from qfleet.core.tensors import TensorBatch

_KINDS = [nn.Conv2d, nn.ReLU] * 3 + [nn.Linear, nn.ReLU, nn.Linear]
"""The layers of the network. The types are exact: a layer with a spectral norm is of a subclass."""
_UNITS = 128
"""The dense layer's width must be a multiple of this: kernels have no ragged columns."""
_OPERANDS: dict[Precision, tuple[torch.dtype, str]] = {
    "bf16": (torch.bfloat16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "fp32": (torch.float32, "ieee"),
}
"""The type of operands, and of all that lies between two layers, and the form of their products."""


def supports(network: QNetwork, agent: DeepAgent) -> bool:
    """Return whether this file can do the network's work: `NatureConfig` on one stack of byte frames, plain values.

    The frames of a stack make a side of a block, so there must be a power of two of them.
    """
    if agent.dueling or (isinstance(agent, ReplayAgent) and (agent.noisy or agent.munchausen is not None)):
        return False
    if [type(layer) for layer in layers_of(network)] != _KINDS:
        return False
    assert isinstance(network.torso, Torso)
    stage, shapes = network.torso.inputs.stages[0], network.torso.inputs.shapes
    convs, dense, _ = parts_of(network)
    channels = convs[0].in_channels
    stacked = list(shapes) == [PLAIN] and len(shapes[PLAIN]) == 3 and shapes[PLAIN][0] == channels
    zeros = all(conv.padding_mode == "zeros" and not isinstance(conv.padding, str) for conv in convs)
    blocks = channels.bit_count() == 1 and dense.out_features % _UNITS == 0
    return stacked and zeros and blocks and isinstance(stage, inputs._Pixels)


class NatureGradient:
    """The gradient of a network that `supports` accepts, with products in bf16 or tf32 (or fp32, for comparison).

    In bf16 the weights, as products see them, and what lies between two layers are bfloat16. In tf32 both are float32,
    of which products take 10 bits. The last layer is as exact as float32 in every format.

    Make it after the `FlatParameters` of both networks. Observations are uint8 [B, C, H, W], or [B, H, W, C] with
    `channels_last`. What the methods return lies in memory that the next call overwrites.
    """

    def __init__(
        self,
        agent: DeepAgent,
        flat: FlatParameters,
        online: QNetwork,
        target: QNetwork | None,
        precision: Precision = "bf16",
        channels_last: bool = False,
        tiles: NatureTiles | None = None,
    ) -> None:
        """Take `tiles` in place of those known to be good for the batch size."""
        if precision not in _OPERANDS:
            raise ValueError("these kernels have no loss scale, which float16 needs")
        dtype, self._form = _OPERANDS[precision]
        self._agent, self._gradients, self._tiles = agent, flat.gradients, tiles
        self._layout = layout = NatureLayout(online, flat, planes=not channels_last)
        self._parameters = [flat.parameters] if target is None else [flat.parameters, flat_view(target, flat)]
        device = flat.parameters.device
        self._packed = torch.zeros(len(self._parameters), layout.packed_size, dtype=dtype, device=device)
        self._weights = layout.packed_weights(self._packed)
        online_parameters, target_parameters = self._parameters[0], self._parameters[-1]
        self._heads = layout.head(online_parameters), layout.head(target_parameters)
        pairs = layout.conv_biases(online_parameters), layout.conv_biases(target_parameters)
        self._biases = list(zip(*pairs, strict=True))
        self._dense_bias = layout.dense_bias(flat.gradients).unsqueeze(0)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._known: dict[tuple[int, int], NatureBuffers] = {}
        self._buffers: NatureBuffers
        self._seen: Tensor
        """The states' frames as the first layer saw them: its gradient needs them again."""

    def replay(self, batch: TensorBatch) -> Replayed:
        """Take the loss of a batch of replayed transitions."""
        assert isinstance(self._agent, ReplayAgent)
        outputs = self.values(batch.observation[PLAIN], batch.next_observation[PLAIN])
        loss = self._buffers.loss
        scalar_gradient(self._agent, outputs, batch, loss)
        self.backward(loss.gradient)
        return Replayed(loss.total, loss.priority, {"q_mean": loss.q_mean})

    def regression(
        self, observation: dict[str, Tensor], action: Tensor, goal: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take the mean error of the values of the actions [B] against the goals [B]; return it and the mean value."""
        agent, frames = self._agent, observation[PLAIN]
        values = self.values(frames).predicted
        loss = self._buffers.loss
        share = None if weight is None else weight / weight.sum().clamp(min=1)
        size = len(frames) if weight is None else 1
        regression_gradient(agent.loss, agent.huber_threshold, values, action, goal, share, size, loss)
        self.backward(loss.gradient)
        # The next minibatch uses the same buffers, and the caller keeps what it is given.
        mean = loss.q_mean.clone() if share is None else torch.dot(pick(values, action), share)
        return loss.total.clone(), mean

    def values(self, frames: Tensor, next_frames: Tensor | None = None) -> Outputs:
        """Return the values [B, A] of states by the online network and, if given, of next states as the agent needs."""
        buffers = self._buffers = self._buffers_for(frames, next_frames)
        layout, tiles, online, form = self._layout, buffers.tiles, buffers.online, self._form
        weights, biases, images = self._weights, self._biases, buffers.images
        frames, next_frames = buffers.padded(frames, next_frames)
        self._seen = frames
        pack(self._parameters, layout.packed_places, layout.turned, self._packed)
        conv1, conv2, conv3 = layout.convs
        frames_forward(conv1, tiles.conv1, frames, next_frames, weights[0], biases[0], images[0], layout.planes, form)
        conv_forward(conv2, tiles.conv2, images[0], online, weights[1], biases[1], images[1], form)
        conv_forward(conv3, tiles.conv3, images[1], online, weights[2], biases[2], images[2], form)
        conv_partials(layout.dense, tiles.dense, images[2], online, weights[3], buffers.dense_parts, form)
        head_forward(buffers.dense_parts, online, *self._heads, buffers.hidden, buffers.q, tiles.head_together)
        return buffers.outputs

    def backward(self, upstream: Tensor) -> None:
        """Fill the flat gradient for the gradient [B, A] of the values of the states that `values` has just seen."""
        layout, tiles, sums, form = self._layout, self._buffers.tiles, self._buffers.sums, self._form
        dense, (conv1, conv2, conv3) = layout.dense, layout.convs
        image1, image2, image3 = (image[: len(upstream)] for image in self._buffers.images)
        slope1, slope2, slope3 = self._buffers.slopes
        hidden, slope4 = self._buffers.hidden, self._buffers.hidden_slope
        _, weight2, weight3, weight4 = (weight[0] for weight in self._weights)
        head_backward(upstream, hidden, self._heads[0].weight, slope4, *sums.head)
        with self._beside():
            conv_backward_weight(dense, tiles.dense_weight, image3, slope4, sums.dense, self._dense_bias, form)
        conv_backward_input(dense, tiles.dense_input, slope4, weight4, image3, slope3, form)
        with self._beside():
            conv_backward_weight(conv3, tiles.conv3_weight, image2, slope3, *sums.convs[2], form)
        conv_backward_input(conv3, tiles.conv3_input, slope3, weight3, image2, slope2, form)
        with self._beside():
            conv_backward_weight(conv2, tiles.conv2_weight, image1, slope2, *sums.convs[1], form)
        conv_backward_input(conv2, tiles.conv2_input, slope2, weight2, image1, slope1, form)
        frames_backward_weight(conv1, tiles.conv1_weight, self._seen, slope1, *sums.convs[0], layout.planes, form)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        fold(sums.whole, sums.table, sums.most, layout.places, sums.dense[0], layout.turned, self._gradients)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Launch on the second stream, after all that was launched so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _buffers_for(self, frames: Tensor, next_frames: Tensor | None) -> NatureBuffers:
        for images in (frames, frames if next_frames is None else next_frames):
            if images.dtype != torch.uint8 or not images.is_contiguous() or images.shape != frames.shape:
                raise ValueError(f"frames must be contiguous bytes, not {images.dtype} of strides {images.stride()}")
        double = isinstance(self._agent, ReplayAgent) and self._agent.double
        key = len(frames), 1 if next_frames is None else 3 if double else 2
        if key not in self._known:
            tiles = self._tiles or tiles_for(len(frames), self._packed.dtype)
            self._known[key] = NatureBuffers(self._layout, tiles, *key, self._packed.dtype, self._packed.device)
        return self._known[key]
