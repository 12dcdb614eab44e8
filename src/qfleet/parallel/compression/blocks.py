"""Gradients as one byte or one bit a value, with a scale for each block of them."""

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

_GATHER_BITS = 0x0102040810204080
"""Times eight bytes of 0 or 1 in a word, gives their bits in its highest byte, the first byte's lowest."""


class _BlockCodec(Codec):
    """Holds a vector's blocks, the last one filled up with zeros."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._blocks = size, -(-size // BLOCK)
        self._padded = torch.zeros(self._blocks * BLOCK, device=device)

    def _copied(self, vector: Tensor) -> Tensor:
        """Return a vector's values in the codec's own memory [blocks, BLOCK]."""
        self._padded[: self._size].copy_(vector)
        return self._padded.view(-1, BLOCK)


class Int8Codec(_BlockCodec):
    """Each value as a multiple of its block's scale.

    With a generator it is rounded up or down at random so that its mean is right; without one, to the nearest.
    """

    def __init__(self, size: int, device: torch.device, generator: torch.Generator | None = None) -> None:
        super().__init__(size, device)
        self._generator = generator
        if generator is not None:
            self._random = torch.empty(self._blocks * BLOCK // 4, dtype=torch.int64, device=device)

    def encode(self, vector: Tensor) -> Payload:
        """Return scales [blocks] and multiples [P] of one byte."""
        values = self._copied(vector)
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


class SignCodec(_BlockCodec):
    """Each value as its sign, times the mean size of the values in its block.

    Zeros become positive. Fed back, the error makes them negative the next time.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device)
        filled = size - torch.arange(self._blocks, device=device) * BLOCK
        self._filled = filled.clamp(max=BLOCK).float()
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
        self._signs = bits.float() * 2 - 1

    def encode(self, vector: Tensor) -> Payload:
        """Return scales [blocks] and signs [P / 8], eight to a byte."""
        values = self._copied(vector)
        scales = values.abs().sum(1) / self._filled
        words = (values >= 0).view(-1).view(torch.int64)
        packed = ((words * _GATHER_BITS) >> 56).to(torch.uint8)
        return [scales, packed[: -(-self._size // 8)]]

    def add(self, payload: Payload, out: Tensor, alpha: float = 1.0) -> None:
        """Add the signs times the scales to a vector [P]."""
        scales, packed = payload
        signs = self._signs.index_select(0, packed.int()).view(-1)[: self._size]
        _add_scaled(signs, scales, out, alpha)


def _add_scaled(levels: Tensor, scales: Tensor, out: Tensor, alpha: float) -> None:
    """Add levels [P], each times the scale of its block, to a vector [P]."""
    full = len(out) // BLOCK
    whole = full * BLOCK
    out[:whole].view(-1, BLOCK).addcmul_(levels[:whole].view(-1, BLOCK), scales[:full, None], value=alpha)
    out[whole:].addcmul_(levels[whole:], scales[full:], value=alpha)
