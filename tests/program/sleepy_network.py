"""Networks that take their time in the processes of one kind of role."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import torch

SLEEP_S = 0.02


class _Sleepy(torch.nn.Module):
    slow = ""
    """With what the names of the slow processes begin."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self._layer = torch.nn.Linear(4, 8)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if multiprocessing.current_process().name.startswith(self.slow):
            time.sleep(SLEEP_S)
        return torch.tanh(self._layer(observation))


class SleepyServer(_Sleepy):
    """Slow in inference servers."""

    slow = "inference"


class SleepyActor(_Sleepy):
    """Slow in actors."""

    slow = "actor"
