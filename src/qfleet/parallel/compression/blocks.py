"""Gradients as one byte a value, with a scale for each block of them."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.core.role import State
from qfleet.parallel.compression.codec import Codec, Payload

BLOCK = 1024
"""Values that share a scale, which takes 4 bytes."""

_LEVELS = 126.99
"""Steps from zero to a block's largest value: a little under 127, so that rounding never leaves a byte."""

_TINY = 1e-30
"""The least scale: its inverse is finite."""


class Int8Codec(Codec):
    """Each value as a multiple of its block's scale.

    With a generator it is rounded up or down at random so that its mean is right; without one, to the nearest.
    """

    def __init__(self, size: int, device: torch.device, generator: torch.Generator | None = None) -> None:
        self._size, self._blocks = size, -(-size // BLOCK)
        self._padded = torch.zeros(self._blocks * BLOCK, device=device)
        self._generator = generator
        if generator is not None:
            self._random = torch.empty(self._blocks * BLOCK // 4, dtype=torch.int64, device=device)

    def encode(self, vector: Tensor) -> Payload:
        """Return scales [blocks] and multiples [P] of one byte."""
        self._padded[: self._size].copy_(vector)
        values = self._padded.view(-1, BLOCK)
        scales = (values.abs().amax(1, keepdim=True) / _LEVELS).clamp_(min=_TINY)
        levels = values.mul_(scales.reciprocal()).view(-1)
        if self._generator is not None:
            # Four roundings share a random word: 16 bits are enough, and to draw them is a third of the work.
            noise = self._random.random_(-(2**63), None, generator=self._generator).view(torch.int16)
            levels.add_(noise, alpha=2.0**-16)
        return [scales.view(-1), levels.round_()[: self._size].to(torch.int8)]

    def add(self, payload: Payload, out: Tensor, alpha: float = 1.0) -> None:
        """Add the multiples of the scales to a vector [P]."""
        scales, levels = payload
        _add_scaled(levels, scales, out, alpha)

    def state_dict(self) -> State:
        """Return where the random numbers are."""
        return {} if self._generator is None else {"random": self._generator.get_state()}

    def load_state_dict(self, state: State) -> None:
        """Continue with the same random numbers."""
        if self._generator is not None:
            self._generator.set_state(state["random"])


def _add_scaled(levels: Tensor, scales: Tensor, out: Tensor, alpha: float) -> None:
    """Add levels [P], each times the scale of its block, to a vector [P]."""
    full = len(out) // BLOCK
    whole = full * BLOCK
    out[:whole].view(-1, BLOCK).addcmul_(levels[:whole].view(-1, BLOCK), scales[:full, None], value=alpha)
    out[whole:].addcmul_(levels[whole:], scales[full:], value=alpha)
