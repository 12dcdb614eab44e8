"""The last stage of a network: from features to values of actions, as numbers or as distributions of returns."""

from __future__ import annotations

import math
from typing import Annotated, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from qfleet.algo.layers import NoisyLinear
from qfleet.algo.torsos import DeepConfig, hidden_layer
from qfleet.core.config import Config


class ScalarConfig(Config):
    """One value for each action."""

    kind: Literal["scalar"] = "scalar"
    """Selects this head."""


class CategoricalConfig(Config):
    """Probabilities of fixed returns for each action: C51 (Bellemare et al., 2017)."""

    kind: Literal["categorical"] = "categorical"
    """Selects this head."""
    atoms: int = Field(default=51, ge=2)
    """Number of returns."""
    v_min: float = -10.0
    """The smallest return (after reward scaling)."""
    v_max: float = 10.0
    """The largest return (after reward scaling)."""

    @model_validator(mode="after")
    def _check_range(self) -> CategoricalConfig:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min ({self.v_min}) must be below v_max ({self.v_max})")
        return self


class QuantileConfig(Config):
    """Quantiles of the return at fixed fractions for each action: QR-DQN (Dabney et al., 2018)."""

    kind: Literal["quantile"] = "quantile"
    """Selects this head."""
    quantiles: int = Field(default=200, ge=1)
    """Number of quantiles."""


class ImplicitQuantileConfig(Config):
    """Quantiles of the return at any fraction for each action: IQN (Dabney et al., 2018)."""

    kind: Literal["implicit_quantile"] = "implicit_quantile"
    """Selects this head."""
    taus: int = Field(default=64, ge=1)
    """Random fractions of each sample's prediction."""
    target_taus: int = Field(default=64, ge=1)
    """Random fractions of each sample's target."""
    acting_taus: int = Field(default=32, ge=1)
    """Evenly spaced fractions whose mean is the value of an action."""
    cosines: int = Field(default=64, ge=1)
    """Cosines that describe a fraction to the network."""


HeadConfig = Annotated[
    ScalarConfig | CategoricalConfig | QuantileConfig | ImplicitQuantileConfig, Field(discriminator="kind")
]


class Streams(nn.Module):
    """The dense layers of a head: one stream, or value and advantage (dueling, Wang et al., 2016)."""

    def __init__(self, config: DeepConfig, features: int, shape: tuple[int, ...], dueling: bool, noisy: bool) -> None:
        """Take the shape of one output: (actions,) or (actions, entries of a distribution)."""
        super().__init__()
        self._shape = shape
        self._entries = shape[1:]
        entries = math.prod(self._entries)
        self.advantage = _stream(config, features, shape[0] * entries, noisy)
        self.value = _stream(config, features, entries, noisy) if dueling else None

    def forward(self, features: Tensor) -> Tensor:
        """Map [..., F] to [..., A] or [..., A, entries]."""
        advantage = cast(Tensor, self.advantage(features))
        if self._entries:
            advantage = advantage.view(*advantage.shape[:-1], *self._shape)
        if self.value is None:
            return advantage
        axis = -1 - len(self._entries)
        value = cast(Tensor, self.value(features))
        if self._entries:
            value = value.unsqueeze(axis)
        return value + advantage - advantage.mean(axis, keepdim=True)


class ScalarHead(nn.Module):
    """Values [B, A]."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, features: Tensor) -> Tensor:
        """Map [B, F] to values [B, A]."""
        return cast(Tensor, self.streams(features))

    def expectation(self, output: Tensor) -> Tensor:
        """Return the output itself [B, A]."""
        return output


class CategoricalHead(nn.Module):
    """Logits [B, A, atoms] of the probabilities of `support`."""

    support: Tensor

    def __init__(self, streams: Streams, config: CategoricalConfig) -> None:
        super().__init__()
        self.streams = streams
        self.register_buffer("support", torch.linspace(config.v_min, config.v_max, config.atoms), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Map [B, F] to logits [B, A, atoms]."""
        return cast(Tensor, self.streams(features))

    def expectation(self, output: Tensor) -> Tensor:
        """Return the mean returns [B, A] of logits, with all digits where layers are computed in fewer."""
        with torch.autocast(output.device.type, enabled=False):
            return output.softmax(-1) @ self.support


class QuantileHead(nn.Module):
    """Quantiles [B, A, N] at the fractions `taus` [1, N]."""

    taus: Tensor

    def __init__(self, streams: Streams, config: QuantileConfig) -> None:
        super().__init__()
        self.streams = streams
        self.register_buffer("taus", midpoints(config.quantiles), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Map [B, F] to quantiles [B, A, N]."""
        return cast(Tensor, self.streams(features))

    def expectation(self, output: Tensor) -> Tensor:
        """Return the mean returns [B, A] of quantiles."""
        return output.mean(-1)


class ImplicitQuantileHead(nn.Module):
    """Quantiles [B, A, N] at fractions that the caller gives, or at evenly spaced ones for acting."""

    acting_taus: Tensor
    frequencies: Tensor

    def __init__(self, streams: Streams, config: ImplicitQuantileConfig, features: int) -> None:
        super().__init__()
        self.streams = streams
        self.embedding = nn.Sequential(nn.Linear(config.cosines, features), nn.ReLU())
        self.register_buffer("acting_taus", midpoints(config.acting_taus), persistent=False)
        self.register_buffer("frequencies", math.pi * torch.arange(1.0, config.cosines + 1), persistent=False)

    def forward(self, features: Tensor, taus: Tensor | None = None) -> Tensor:
        """Map [B, F] and fractions [B, N] (or [1, N] for the whole batch) to quantiles [B, A, N]."""
        if taus is None:
            taus = self.acting_taus
        embedded = self.embedding(torch.cos(taus.unsqueeze(-1) * self.frequencies))
        return cast(Tensor, self.streams(features.unsqueeze(1) * embedded)).transpose(1, 2)

    def expectation(self, output: Tensor) -> Tensor:
        """Return the mean returns [B, A] of quantiles."""
        return output.mean(-1)


class TableHead(nn.Module):
    """A table [S, A] of values, looked up by state."""

    def __init__(self, states: int, actions: int, initial: float) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((states, actions), initial))

    def forward(self, state: Tensor) -> Tensor:
        """Map states [B] to values [B, A]."""
        return self.table[state]

    def expectation(self, output: Tensor) -> Tensor:
        """Return the output itself [B, A]."""
        return output


Head = ScalarHead | CategoricalHead | QuantileHead | ImplicitQuantileHead | TableHead


def midpoints(count: int) -> Tensor:
    """Return the middles [1, count] of equal parts of 0..1."""
    return ((torch.arange(count, dtype=torch.float32) + 0.5) / count).unsqueeze(0)


def _stream(config: DeepConfig, features: int, outputs: int, noisy: bool) -> nn.Module:
    width = config.dense or features
    last = NoisyLinear(width, outputs) if noisy else nn.Linear(width, outputs)
    return nn.Sequential(*hidden_layer(config, features, config.dense, noisy), last)
