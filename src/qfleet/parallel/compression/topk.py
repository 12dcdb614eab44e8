"""Gradients as their largest values: two bytes for each, and two for its place."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.core.role import State
from qfleet.parallel.compression.codec import Codec, Payload
from qfleet.parallel.compression.config import TopKConfig

_START = 0.25
"""Share of the values that the first update of a warm-up sends."""

_ROW = 32
"""Values of which only the largest is looked at first; found by timing."""

_SPAN = 65536
"""A place is counted from the start of its span of this many values, to fit into two bytes."""

_TINY = 1e-30
"""The least scale: its inverse is finite."""


class TopKCodec(Codec):
    """The largest values of a vector; how many of them falls during the warm-up, by the number of calls."""

    def __init__(self, config: TopKConfig, size: int, device: torch.device) -> None:
        self._config, self._size = config, size
        self._updates = 0
        rows = -(-size // _ROW)
        self._sizes = torch.full((rows * _ROW,), -1.0, device=device)  # the padding is smaller than any value
        self._span_ends = torch.arange(1, -(-size // _SPAN) + 1, device=device) * _SPAN
        self._least = torch.full((1,), _TINY, device=device)

    @property
    def kept(self) -> int:
        """Values that the next update sends."""
        config = self._config
        warmed = min(1.0, self._updates / config.warmup) if config.warmup else 1.0
        start = max(_START, config.fraction)
        return min(self._size, max(1, int(self._size * start * (config.fraction / start) ** warmed)))

    def encode(self, vector: Tensor) -> Payload:
        """Return how many values lie before the end of each span, their scale, and their places and sizes [kept]."""
        places = self._largest(vector, self.kept).sort().values
        self._updates += 1
        values = vector[places]
        scale = torch.cat([values.abs(), self._least]).amax().view(1)
        ends = torch.searchsorted(places, self._span_ends)
        # Each is a share of the largest: float16 has no room for a gradient's range. The cast drops the spans.
        return [ends.int(), scale, places.to(torch.int16), (values / scale).half()]

    def add(self, payload: Payload, out: Tensor, alpha: float = 1.0) -> None:
        """Add the values to those at their places in a vector [P]."""
        _, scale, _, shares = payload
        out.index_add_(0, self.places(payload), shares.float() * scale, alpha=alpha)

    def places(self, payload: Payload) -> Tensor:
        """Return the places [kept] of the values that a payload holds, ascending."""
        ends, _, offsets, _ = payload
        order = torch.arange(len(offsets), dtype=torch.int32, device=offsets.device)
        spans = torch.searchsorted(ends, order, right=True)
        return spans * _SPAN + offsets.long() % _SPAN

    def _largest(self, vector: Tensor, count: int) -> Tensor:
        """Return the places of the largest values.

        No more than `count` rows hold any of them, and those are the rows with the largest maxima.
        """
        torch.abs(vector, out=self._sizes[: self._size])
        rows = self._sizes.view(-1, _ROW)
        if len(rows) <= count:
            return self._sizes.topk(count, sorted=False).indices
        best = rows.amax(1).topk(count, sorted=False).indices
        among = rows[best].view(-1).topk(count, sorted=False).indices
        return best[among // _ROW] * _ROW + among % _ROW

    def state_dict(self) -> State:
        """Return how far the warm-up is."""
        return {"updates": self._updates}

    def load_state_dict(self, state: State) -> None:
        """Continue the warm-up."""
        self._updates = int(state["updates"])
