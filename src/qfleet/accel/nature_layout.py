"""Where the Nature network's layers lie: in flat parameters and gradients, in packed weights, and in partial sums."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from qfleet.accel.kernels.conv import Conv
from qfleet.accel.kernels.head import Dense
from qfleet.accel.kernels.packing import BLOCK, Turned
from qfleet.accel.nature_tiles import NatureTiles
from qfleet.algo.flat import FlatParameters
from qfleet.algo.heads import ScalarHead
from qfleet.algo.networks import QNetwork
from qfleet.algo.torsos import Torso
from qfleet.core.spec import PLAIN


class NatureLayout:
    """The layers' shapes and places.

    Convolutions and the last layer are "small": their entries are brought from the flat tensors and back one by one,
    by the table `places` [...] int32. It has a region for the packed weights of each convolution, for each of their
    biases, and for the last layer's weight and bias; each region is padded with -1 to whole blocks.
    """

    def __init__(self, network: QNetwork, flat: FlatParameters, planes: bool) -> None:
        """Take `planes` for frames [B, C, H, W] rather than [B, H, W, C]: the first layer is packed accordingly."""
        self.planes = planes
        convs, dense, last = parts_of(network)
        assert isinstance(network.torso, Torso)
        channels, height, width = network.torso.inputs.shapes[PLAIN]
        shapes: list[Conv] = []
        paddings = [*map(padding_of, convs), (0, 0)]
        for conv, padding, border in zip(convs, paddings, paddings[1:], strict=False):
            sides = (conv.kernel_size[0], conv.stride[0], padding, border)
            shapes.append(Conv(height, width, channels, conv.out_channels, *sides))
            channels, height, width = conv.out_channels, shapes[-1].out_height, shapes[-1].out_width
        self.convs = tuple(shapes)
        self.dense = Conv(1, 1, channels * height * width, dense.out_features)
        self.actions = last.out_features
        layers: list[nn.Conv2d | nn.Linear] = [*convs, dense, last]
        starts = [_starts(layer, flat) for layer in layers]
        self._weights, self._biases = [weight for weight, _ in starts], [bias for _, bias in starts]
        self.turned = Turned(self._weights[3], dense.out_features, channels, height * width)
        conv_sizes = [shape.outputs * shape.patch for shape in shapes]
        self.regions = [*conv_sizes, *(s.outputs for s in shapes), self.actions * dense.out_features, self.actions]
        self._packed = [0, *accumulate(conv_sizes)]
        self.packed_size = self._packed[3] + dense.out_features * dense.in_features
        self.places = self._table().to(flat.parameters.device)

    @property
    def packed_places(self) -> Tensor:
        """The part of the table that belongs to the convolutions' weights."""
        return self.places[: self._packed[3]]

    def packed_weights(self, packed: Tensor) -> list[Tensor]:
        """Return the weights [networks, N, K] of the convolutions and the dense layer."""
        layers = zip(self._packed, (*self.convs, self.dense), strict=True)
        return [
            packed[:, start : start + conv.outputs * conv.patch].view(-1, conv.outputs, conv.patch)
            for start, conv in layers
        ]

    def conv_biases(self, flat: Tensor) -> list[Tensor]:
        """Return the biases of the convolutions within a flat tensor."""
        return [flat[start : start + c.outputs] for start, c in zip(self._biases[:3], self.convs, strict=True)]

    def dense_bias(self, flat: Tensor) -> Tensor:
        """Return the bias [N] of the dense layer within a flat tensor."""
        return flat[self._biases[3] : self._biases[3] + self.dense.outputs]

    def head(self, flat: Tensor) -> Dense:
        """Return what the last layer's kernels need of flat parameters."""
        weight = flat[self._weights[4] : self._weights[4] + self.actions * self.dense.outputs]
        bias = flat[self._biases[4] : self._biases[4] + self.actions]
        return Dense(self.dense_bias(flat), weight.view(self.actions, self.dense.outputs), bias)

    def _table(self) -> Tensor:
        regions = []
        for layer, conv in enumerate(self.convs):
            entries = torch.arange(conv.outputs * conv.patch, dtype=torch.int32) + self._weights[layer]
            entries = entries.view(conv.outputs, conv.channels, conv.kernel, conv.kernel)
            regions.append((entries if self.planes and layer == 0 else entries.permute(0, 2, 3, 1)).flatten())
        starts = [*self._biases[:3], self._weights[4], self._biases[4]]
        for start, size in zip(starts, self.regions[3:], strict=True):
            regions.append(torch.arange(size, dtype=torch.int32) + start)
        return torch.cat([nn.functional.pad(region, (0, -len(region) % BLOCK), value=-1) for region in regions])


class NatureSums:
    """Partial sums of the gradients of all weights, before they are added and written to the flat gradients."""

    def __init__(self, layout: NatureLayout, tiles: NatureTiles, device: torch.device) -> None:
        convs = (tiles.conv1_splits, tiles.conv2_splits, tiles.conv3_splits)
        splits = [*convs, *convs, tiles.head_splits, tiles.head_splits]
        padded = [size + -size % BLOCK for size in layout.regions]
        starts = [0, *accumulate(split * size for split, size in zip(splits, padded, strict=True))]
        self.most = max(splits)
        self.whole = torch.zeros(starts[-1], device=device)
        rows = [
            (start + block, size, split)
            for start, size, split in zip(starts, padded, splits, strict=False)
            for block in range(0, size, BLOCK)
        ]
        self.table = torch.tensor(rows, dtype=torch.int32, device=device)
        views = [
            self.whole[start : start + split * size].view(split, size)[:, :used]
            for start, size, split, used in zip(starts, padded, splits, layout.regions, strict=False)
        ]
        weights = [view.view(-1, conv.outputs, conv.patch) for view, conv in zip(views, layout.convs, strict=False)]
        self.convs = list(zip(weights, views[3:6], strict=True))
        self.head = (views[6].view(-1, layout.actions, layout.dense.outputs), views[7])
        self.dense = torch.zeros(1, layout.dense.outputs, layout.dense.patch, device=device)


def parts_of(network: QNetwork) -> tuple[list[nn.Conv2d], nn.Linear, nn.Linear]:
    """Return the convolutions, the dense and the last layer of a network of these layers."""
    modules = layers_of(network)
    convs = [module for module in modules if isinstance(module, nn.Conv2d)]
    dense, last = (module for module in modules if isinstance(module, nn.Linear))
    return convs, dense, last


def layers_of(network: QNetwork) -> list[nn.Module]:
    """Return all layers from a single image to the values, in order; none if the network is of another kind."""
    if not isinstance(network.torso, Torso) or not isinstance(network.head, ScalarHead):
        return []
    images = list(getattr(network.torso.body, "images", []))
    streams = [*images, network.head.streams.advantage] if len(images) == 1 else []
    return [layer for stream in streams for layer in stream.children()]


def padding_of(conv: nn.Conv2d) -> tuple[int, int]:
    """Return the rows of zeros that a convolution sees above and below an image, and the columns on either side."""
    assert not isinstance(conv.padding, str)
    rows, columns = conv.padding
    return rows, columns


def flat_view(network: QNetwork, like: FlatParameters) -> Tensor:
    """Return the flat parameters [P] of a network that is built like another one, whose flat parameters are given."""
    first = next(network.parameters()).data
    return first.as_strided((len(like.parameters),), (1,), first.storage_offset())


def _starts(layer: nn.Conv2d | nn.Linear, flat: FlatParameters) -> tuple[int, int]:
    """Return where weight and bias of a layer begin in the flat parameters."""
    assert layer.bias is not None
    origin = flat.parameters.storage_offset()
    return int(layer.weight.data.storage_offset() - origin), int(layer.bias.data.storage_offset() - origin)
