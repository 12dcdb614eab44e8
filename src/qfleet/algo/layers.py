"""The layers that torch does not have in the form needed here: noisy, and random only through a given generator."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Literal["relu", "elu", "gelu", "silu", "tanh"]
_ACTIVATIONS: dict[Activation, type[nn.Module]] = {
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def activation_layer(name: Activation) -> nn.Module:
    """Return a new activation layer."""
    return _ACTIVATIONS[name]()


class NoisyLinear(nn.Module):
    """A linear layer whose weights carry learned, factorised Gaussian noise (Fortunato et al., 2018).

    The noise is what `resample` drew last; before the first draw, and in evaluation mode, there is none.
    It is not part of the state: whoever uses the layer in training mode draws new noise before each use.
    """

    noise_in: Tensor
    noise_out: Tensor

    def __init__(self, inputs: int, outputs: int, sigma: float = 0.5) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma * bound))
        # Not persistent: published weights must not carry the learner's noise to every actor.
        self.register_buffer("noise_in", torch.zeros(inputs), persistent=False)
        self.register_buffer("noise_out", torch.zeros(outputs), persistent=False)

    def resample(self, generator: torch.Generator) -> None:
        """Draw new noise, in place."""
        for noise in (self.noise_in, self.noise_out):
            noise.normal_(generator=generator)
            noise.copy_(noise.sign() * noise.abs().sqrt())

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        if not self.training:
            return F.linear(inputs, self.weight, self.bias)
        weight = self.weight + self.weight_sigma * torch.outer(self.noise_out, self.noise_in)
        return F.linear(inputs, weight, self.bias + self.bias_sigma * self.noise_out)


class Dropout(nn.Module):
    """Dropout whose random numbers come from `generator`, never from torch's global stream."""

    generator: torch.Generator | None = None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.keep = 1 - rate

    def forward(self, inputs: Tensor) -> Tensor:
        """Zero a random part of the entries in training mode and scale the others up."""
        if not self.training:
            return inputs
        if self.generator is None:
            raise RuntimeError("a network with dropout needs QNetwork.set_generator before it trains")
        return inputs * torch.empty_like(inputs).bernoulli_(self.keep, generator=self.generator).div_(self.keep)
