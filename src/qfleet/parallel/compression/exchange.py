"""Sums compressed gradients over a group of ranks, with the same bits on each of them."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from qfleet.parallel.compression.codec import Payload
from qfleet.parallel.compression.feedback import Compressor


class Transport(Protocol):
    """A group of ranks, such as `GradientGroup`; every rank makes the same calls with equal shapes."""

    @property
    def rank(self) -> int:
        """This rank's place in the group."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous tensor by its sum over all ranks, the same bits on each."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of ranks."""


class CompressedSum:
    """A gradient hook: replaces the flat gradient [P] by about its sum over all ranks of a group.

    Ranks on machines of one kind get the same bits. A gradient whose norm is not finite, on any rank, makes the sum NaN
    on all of them, so that all skip the update, and what they owe each other stays as it was.
    """

    def __init__(self, compressor: Compressor, group: Transport) -> None:
        self._compressor, self._group = compressor, group
        self.bytes_sent = 0
        """Bytes that this rank has sent."""
        self.bytes_plain = 0
        """Bytes that it would have sent without compression."""
        self.culprit: int | None = None
        """The first rank whose latest gradient was not finite."""

    def __call__(self, gradient: Tensor) -> Tensor:
        """Sum in place. Waits for the other ranks."""
        corrected = self._compressor.corrected(gradient)
        wire = _FlaggedWire(self._group, ~torch.isfinite(torch.linalg.vector_norm(corrected)))
        try:
            own, shares = self._compressor.codec.share(corrected, wire)
        except _NotFinite as spoiled:
            self.culprit = spoiled.rank
            return gradient.fill_(math.nan)
        finally:
            self.bytes_sent += wire.bytes_sent
            self.bytes_plain += reduced_bytes(gradient, self._group.size)
        self.culprit = None
        self._compressor.sent(own)
        gradient.zero_()
        for share in shares:
            self._compressor.codec.add(share, gradient)
        return gradient


def reduced_bytes(tensor: Tensor, ranks: int) -> int:
    """Return how many bytes a rank sends in an all-reduce: each part goes round once to be summed, once as the sum."""
    return tensor.numel() * tensor.element_size() * 2 * (ranks - 1) // ranks


class _NotFinite(Exception):
    """A rank has told all that its gradient is not finite."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class _FlaggedWire:
    """Counts what is sent, and sends with everything whether this rank's gradient is spoiled; raises if any is."""

    def __init__(self, group: Transport, spoiled: Tensor) -> None:
        self._group, self._spoiled = group, spoiled.view(1)
        self.size = group.size
        self.bytes_sent = 0

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor [n] over all ranks; each adds its flag to a place of its own."""
        flags = tensor.new_zeros(self.size)
        flags[self._group.rank] = self._spoiled[0]
        summed = self._group.all_reduce_(torch.cat([tensor, flags]))
        self.bytes_sent += reduced_bytes(summed, self.size)
        self._check(summed[len(tensor) :])
        return summed[: len(tensor)]

    def gather(self, payload: Payload) -> list[Payload]:
        """Return the payloads of all ranks, each sent in one piece to every other rank, its flag last."""
        packed = torch.cat([*(part.view(torch.uint8) for part in payload), self._spoiled.view(torch.uint8)])
        gathered = self._group.all_gather(packed)
        self.bytes_sent += len(packed) * (self.size - 1)
        self._check(torch.stack([piece[-1] for piece in gathered]))
        return [_unpacked(piece, payload) for piece in gathered]

    def _check(self, flags: Tensor) -> None:
        """Raise on every rank, for the first one that is flagged; waits for the device."""
        if any(raised := flags.tolist()):
            raise _NotFinite([bool(flag) for flag in raised].index(True))


def _unpacked(packed: Tensor, like: Payload) -> Payload:
    """Return a payload with the types and lengths of another one, as views of its bytes."""
    pieces = torch.split_with_sizes(packed[:-1], [part.numel() * part.element_size() for part in like])
    return [piece.view(part.dtype) for piece, part in zip(pieces, like, strict=True)]
