"""A network that acts on a CPU in fewer bits: its weights are rounded once for each version, not at every call."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from qfleet.accel.onednn import OneDnnLinear
from qfleet.accel.precision import ROUNDED, Precision, autocast
from qfleet.algo.networks import QNetwork


class Rounded:
    """How the values of a network on a CPU are computed: as they are, or with products in fewer bits.

    Autocast alone rounds all weights at each call, which takes as long as the products of a few observations do. So
    plain dense and convolutional layers keep rounded copies of theirs. `foreign` networks do not: nobody knows what
    else is done with their layers.
    """

    def __init__(self, network: QNetwork, precision: Precision, foreign: bool) -> None:
        """Take a network whose weights change in place only, and whoever changes them calls `renew`."""
        self._network, self._precision = network, precision
        self._layers = [] if foreign or precision not in ROUNDED else _rounding_layers(network, ROUNDED[precision])
        self.renew()

    def renew(self) -> None:
        """Round the weights anew: they have changed."""
        for layer in self._layers:
            layer.round()

    def computing(self) -> AbstractContextManager[object]:
        """Return the context in which the network is called."""
        return autocast(self._precision, torch.device("cpu"))

    def values(self, observation: dict[str, Tensor]) -> Tensor:
        """Return the expected values [B, A]."""
        with self.computing():
            return self._network.q(observation)


class _RoundedConv2d(nn.Conv2d):
    """A convolution whose weights were rounded beforehand, with its channels last."""

    dtype: torch.dtype
    rounded: tuple[Tensor, Tensor | None]

    def round(self) -> None:
        weight = self.weight.detach().to(self.dtype, memory_format=torch.channels_last)
        self.rounded = weight, None if self.bias is None else self.bias.detach().to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map images [B, C, H, W] to images."""
        output: Tensor = self._conv_forward(input.to(self.dtype), *self.rounded)
        return output


class _RoundedLinear(nn.Linear):
    """A dense layer whose weights were rounded beforehand."""

    dtype: torch.dtype
    rounded: tuple[Tensor, Tensor | None]

    def round(self) -> None:
        weight = self.weight.detach().to(self.dtype)
        self.rounded = weight, None if self.bias is None else self.bias.detach().to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., I] to [..., O]."""
        return nn.functional.linear(input.to(self.dtype), *self.rounded)


_ROUNDING: dict[type[nn.Module], type[_RoundedConv2d | _RoundedLinear]] = {
    nn.Conv2d: _RoundedConv2d, nn.Linear: _RoundedLinear, OneDnnLinear: _RoundedLinear
}  # fmt: skip


def _rounding_layers(network: nn.Module, dtype: torch.dtype) -> list[_RoundedConv2d | _RoundedLinear]:
    """Let the layers of exactly these types keep rounded copies of their weights; return them."""
    layers: list[_RoundedConv2d | _RoundedLinear] = []
    for module in network.modules():
        if (rounding := _ROUNDING.get(type(module))) is not None:
            module.__class__ = rounding
            assert isinstance(module, _RoundedConv2d | _RoundedLinear)
            module.dtype = dtype
            layers.append(module)
    return layers
