"""Vectors as their largest values, where those are many: a byte for each, and one for the way from the last place."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.parallel.compression.codec import Payload
from qfleet.parallel.compression.topk import TopKCodec

_FAR = 255
"""A byte that leads so far on and to no place: for gaps that one byte cannot hold."""

_FLOAT8 = torch.float8_e4m3fn
"""Four bits of precision, and a range of 2^18 below its largest value."""
_LARGEST = torch.finfo(_FLOAT8).max


class GapCodec(TopKCodec):
    """The largest values, each as a float of 8 bits and the gap before its place; none that are zero."""

    def encode(self, vector: Tensor) -> Payload:
        """Return the scale, the gaps [kept, and one for every 255 values without a place], and the values [kept]."""
        places = self._largest(vector, self.kept).sort().values
        places = places[vector[places] != 0]
        values = vector[places]
        scale = torch.cat([values.abs(), self._least]).amax().view(1) / _LARGEST
        gaps = places.diff(prepend=places.new_full((1,), -1)) - 1
        taken = gaps // _FAR + 1
        steps = torch.full((int(taken.sum()),), _FAR, dtype=torch.uint8, device=vector.device)
        steps[taken.cumsum(0) - 1] = (gaps % _FAR).to(torch.uint8)
        return [scale, steps, (values / scale).to(_FLOAT8).view(torch.uint8)]

    def add(self, payload: Payload, out: Tensor, alpha: float = 1.0) -> None:
        """Add the values to those at their places in a vector [P]."""
        scale, _, values = payload
        out.index_add_(0, self.places(payload), values.view(_FLOAT8).float() * scale, alpha=alpha)

    def places(self, payload: Payload) -> Tensor:
        """Return the places [kept] of the values that a payload holds, ascending."""
        steps = payload[1].long()
        arrives = steps != _FAR
        return (steps + arrives).cumsum(0)[arrives] - 1
