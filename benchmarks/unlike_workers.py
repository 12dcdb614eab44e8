"""A network for CartPole whose gradients take one process longer than the others: what a slow worker is to a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from qfleet.core.spec import PLAIN, EnvSpec

GRADIENT_S, TIMES_SLOWER = 0.004, 5
"""What a gradient takes at least, and how many times as long in the process that computed the very first one."""


class Unlike(nn.Module):
    """The two layers of the preset cartpole. Which process was the first is known by a file."""

    def __init__(self, claim: Path, spec: EnvSpec) -> None:
        super().__init__()
        (size,) = spec.observations[PLAIN].shape
        self._layers = nn.Sequential(nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self._claim, self._pause_s = claim, 0.0

    def forward(self, observation: Tensor) -> Tensor:
        """Map vectors [B, S] to features [B, 128]."""
        if torch.is_grad_enabled():
            self._pause_s = self._pause_s or GRADIENT_S * (TIMES_SLOWER if self._is_first() else 1)
            time.sleep(self._pause_s)
        features: Tensor = self._layers(observation)
        return features

    def _is_first(self) -> bool:
        try:
            os.close(os.open(self._claim, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
