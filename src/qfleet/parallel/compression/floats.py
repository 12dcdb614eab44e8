"""Gradients as float32, float16 or bfloat16: forms that can be summed as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.parallel.compression.codec import Codec, Payload, Wire


class PlainCodec(Codec):
    """Float32, without any loss."""

    def encode(self, vector: Tensor) -> Payload:
        """Return a copy of the values [P]."""
        return [vector.clone()]

    def add(self, payload: Payload, out: Tensor, alpha: float = 1.0) -> None:
        """Add the values to a vector [P]."""
        out.add_(payload[0], alpha=alpha)

    def share(self, vector: Tensor, wire: Wire) -> tuple[Payload, list[Payload]]:
        """Sum over all ranks at once: a gather would cost more with each of them."""
        return [vector], [[wire.total(vector)]]


class HalfCodec(Codec):
    """Two bytes a value; what is too large for the type is cut to its largest."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._largest = dtype, torch.finfo(dtype).max

    def encode(self, vector: Tensor) -> Payload:
        """Return the values [P], rounded."""
        return self._rounded(vector, self._largest)

    def add(self, payload: Payload, out: Tensor, alpha: float = 1.0) -> None:
        """Add the values to a vector [P]."""
        out.add_(payload[0], alpha=alpha)

    def share(self, vector: Tensor, wire: Wire) -> tuple[Payload, list[Payload]]:
        """Gather from two ranks, which is exact; sum over more, where gathering would send more bytes.

        The sum is rounded to two bytes as well, and nobody makes up for that.
        """
        if wire.size <= 2:
            return super().share(vector, wire)
        own = self._rounded(vector, self._largest / (2 * wire.size))  # room for the sum, and for its roundings
        return own, [[wire.total(own[0])]]

    def _rounded(self, vector: Tensor, limit: float) -> Payload:
        return [vector.to(self._dtype).clamp_(-limit, limit)]
