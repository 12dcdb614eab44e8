"""Where the small convolutional network's weights and gradients lie, and the memory that all its passes need."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qfleet.accel.kernels.small_cnn import Last, Layer, Shape
from qfleet.accel.kernels.small_cnn_dense import Parts
from qfleet.accel.kernels.small_cnn_front import front
from qfleet.accel.nature_layout import layers_of
from qfleet.accel.precision import Precision
from qfleet.accel.small_cnn_tiles import SmallCnnTiles
from qfleet.algo import inputs
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import QNetwork
from qfleet.algo.torsos import Torso
from qfleet.core.spec import PLAIN

_TICKETS = 256
"""Blocks of rows whose sums may be shared out."""


class SmallCnnLayout:
    """A network's shape and weights, and what its forward and its backward pass have in common."""

    def __init__(self, network: QNetwork, precision: Precision) -> None:
        if precision == "fp16":
            raise ValueError("these kernels have no loss scale, which float16 needs")
        self.shape = shape_of(network)
        conv, conv_norm, dense, dense_norm, last = _parts_of(network)
        self.conv = Layer(*_weights(conv), *_weights(conv_norm))
        self.dense = Layer(*_weights(dense), *_weights(dense_norm))
        self.last = Last(*_weights(last))
        self.form = "tf32" if precision == "tf32" else "tf32x3"
        """How products of float32 are rounded: to 10 bits, or three times so that nearly nothing is lost."""
        self._kind = torch.bfloat16 if precision == "bf16" else torch.float32
        self._tickets = torch.zeros(_TICKETS, dtype=torch.int32, device=self.conv.weight.device)

    def features(
        self,
        images: Tensor,
        chosen: Tensor | None,
        batch: int,
        tiles: SmallCnnTiles,
        weight: Tensor | None = None,
        divisor: Tensor | None = None,
    ) -> Tensor:
        """Return the features [B, F] of rows of images; see `front`."""
        features = torch.empty(batch, self.shape.features, dtype=self._kind, device=images.device)
        launch = (tiles.front_samples, tiles.front_warps)
        front(self.shape, self.conv, images, chosen, features, self.form, *launch, weight, divisor)
        return features

    def parts(self, batch: int, tiles: SmallCnnTiles) -> Parts:
        """Return room for the parts of the dense layer's sums."""
        rows = batch if tiles.dense_splits > 1 else 0
        return Parts(
            torch.empty(tiles.dense_splits, rows, self.shape.units, device=self._tickets.device), self._tickets
        )


def shape_of(network: QNetwork) -> Shape:
    """Return the sizes of a network of these layers."""
    conv, conv_norm, dense, dense_norm, last = _parts_of(network)
    assert isinstance(network.torso, Torso)
    prepared = network.torso.inputs
    _, height, width = prepared.shapes[PLAIN]
    return Shape(
        channels=conv.in_channels,
        height=height,
        width=width,
        outputs=conv.out_channels,
        units=dense.out_features,
        actions=last.out_features,
        scale=1 / 255 if isinstance(prepared.stages[0], inputs._Pixels) else 1.0,
        conv_epsilon=conv_norm.eps,
        dense_epsilon=dense_norm.eps,
    )


def numbers(leaf: Tensor) -> Tensor:
    """Return a leaf [B, ...] as kernels read it: contiguous, booleans as bytes."""
    leaf = leaf.contiguous()
    return leaf.view(torch.uint8) if leaf.dtype == torch.bool else leaf


def start(flat: FlatParameters, weight: Tensor) -> int:
    """Return where a weight begins in the flat parameters."""
    return int(weight.storage_offset() - flat.parameters.storage_offset())


def places(flat: FlatParameters, *weights: Tensor) -> Tensor:
    """Return where the entries of all these weights, one after the other, lie in the flat parameters: int32."""
    ranges = [torch.arange(weight.numel(), dtype=torch.int32) + start(flat, weight) for weight in weights]
    return torch.cat(ranges).to(flat.parameters.device)


def _parts_of(network: QNetwork) -> tuple[nn.Conv2d, nn.GroupNorm, nn.Linear, nn.LayerNorm, nn.Linear]:
    conv, conv_norm, _, dense, dense_norm, _, last = layers_of(network)
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(conv_norm, nn.GroupNorm)
    assert isinstance(dense, nn.Linear)
    assert isinstance(dense_norm, nn.LayerNorm)
    assert isinstance(last, nn.Linear)
    return conv, conv_norm, dense, dense_norm, last


def _weights(layer: nn.Conv2d | nn.GroupNorm | nn.Linear | nn.LayerNorm) -> tuple[Tensor, Tensor]:
    assert layer.bias is not None
    return layer.weight.data, layer.bias.data
