"""Keeps a game's constant tensors on every device that it is played on."""

from __future__ import annotations

import torch
from torch import Tensor


class Constants:
    """Tensors that are copied to a device when they are first needed there, and never again.

    A small batch pays for each operation, and one with a tensor costs half of what one with a Python number does.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._copies: dict[torch.device, list[Tensor]] = {}

    def on(self, device: torch.device) -> list[Tensor]:
        """Return the tensors in their order, on a device."""
        if device not in self._copies:
            self._copies[device] = [tensor.to(device) for tensor in self._tensors]
        return self._copies[device]
