"""A network whose values are now and then no numbers where it learns."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch

SPOILED = {40, 41, 120, 200}
"""Which of a learner's passes with gradients give NaN, from 1."""


class Spoiled(torch.nn.Module):
    """One small layer."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self._layer = torch.nn.Linear(5, 16)
        self._passes = 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        features = torch.tanh(self._layer(observation.float() / 100))
        if not torch.is_grad_enabled() or not multiprocessing.current_process().name.startswith("learner"):
            return features
        self._passes += 1
        return features * torch.nan if self._passes in SPOILED else features
