"""Memory between torso and head: an LSTM over an episode's features and last actions (R2D2)."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from qfleet.core.config import Config

# All weights lie in one flat buffer, so cuDNN copies an LSTM's out of it before each call: a small cost, told loudly.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")


RESCALING = 1e-3
"""The linear part of `rescaled`, which keeps it invertible everywhere."""


class MemoryConfig(Config):
    """Remembers an episode in an LSTM and learns from sequences of it: R2D2 (Kapturowski et al., 2019)."""

    hidden: int = Field(default=512, gt=0)
    """Units of the LSTM."""
    last_action: bool = True
    """Whether the LSTM sees the action before each observation, besides the observation's features."""
    length: int = Field(default=80, gt=0)
    """Steps of a sequence that are learned from."""
    burn_in: int = Field(default=40, ge=0)
    """Steps before these, which only bring the stored state up to date; none at an episode's start."""
    period: int = Field(default=40, gt=0)
    """Steps from one sequence's start to the next one's."""
    eta: float = Field(default=0.9, ge=0, le=1)
    """Share of the largest error in a sequence's priority; the rest is the mean error."""

    @model_validator(mode="after")
    def _sequences_meet(self) -> MemoryConfig:
        if self.period > self.length:
            raise ValueError(f"period ({self.period}) exceeds length ({self.length}): steps between would be skipped")
        return self


class Memory(nn.Module):
    """An LSTM whose state is one tensor [..., 2 H]: output and cell; all zero before an episode's first observation.

    Last actions are counted from 1; 0 says that there was none.
    """

    features: int
    """Units H of the output."""

    def __init__(self, config: MemoryConfig, features: int, actions: int) -> None:
        super().__init__()
        self.features = config.hidden
        self._actions = actions if config.last_action else 0
        self.lstm = nn.LSTM(features + self._actions, config.hidden, batch_first=True)
        with torch.no_grad():  # gates that begin open let gradients reach far back
            self._weights[2][config.hidden : 2 * config.hidden] = 1.0

    def forward(self, features: Tensor, last_action: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Map features [B, T, F], last actions [B, T] and states [B, 2 H] to outputs [B, T, H] and the next states."""
        output, cell = state.unsqueeze(0).chunk(2, dim=-1)
        outputs, (output, cell) = self.lstm(
            self._inputs(features, last_action), (output.contiguous(), cell.contiguous())
        )
        return outputs, torch.cat([output, cell], dim=-1).squeeze(0)

    def tick(self, features: Tensor, last_action: Tensor, state: Tensor) -> Tensor:
        """Do as `forward` for a single step [B, F], [B], [B, 2 H], several times faster; return the next states."""
        output, cell = state.chunk(2, dim=-1)
        return torch.cat(torch.lstm_cell(self._inputs(features, last_action), (output, cell), *self._weights), dim=-1)

    @property
    def _weights(self) -> list[nn.Parameter]:
        """What the LSTM learns: weights of inputs [4 H, F] and of outputs [4 H, H], and the biases [4 H] of both."""
        return self.lstm.all_weights[0]

    def _inputs(self, features: Tensor, last_action: Tensor) -> Tensor:
        if not self._actions:
            return features
        taken = F.one_hot(last_action, self._actions + 1)[..., 1:]
        return torch.cat([features, taken.to(features.dtype)], dim=-1)


def rescaled(value: Tensor) -> Tensor:
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x: large returns become small ones (Pohlen et al., 2018)."""
    return value.sign() * ((value.abs() + 1).sqrt() - 1) + RESCALING * value


def unscaled(value: Tensor) -> Tensor:
    """Return the inverse of `rescaled`, in a form that loses no digits near 0."""
    size = value.abs()
    root = 2 * (size + 1 + RESCALING) / ((1 + 4 * RESCALING * (size + 1 + RESCALING)).sqrt() + 1)
    return value.sign() * (root - 1) * (root + 1)
