"""What every compressed form of a gradient can do: be written, be read, and be summed over a group of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from qfleet.core.role import State

Payload = list[Tensor]
"""What travels: contiguous tensors of one dimension, those with larger elements first."""


class Wire(Protocol):
    """Connects one rank to all others for the time of one update; every rank makes the same calls."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, the same bits on each; the tensor stays as it is."""

    def gather(self, payload: Payload) -> list[Payload]:
        """Return the payloads of all ranks, which have equal shapes, in the order of ranks."""


class Codec(ABC):
    """Writes a float32 vector [P] in fewer bytes, with a loss, and reads it back."""

    @abstractmethod
    def encode(self, vector: Tensor) -> Payload:
        """Return a vector [P] in its compressed form; the vector stays as it is."""

    @abstractmethod
    def add(self, payload: Payload, out: Tensor, alpha: float = 1.0) -> None:
        """Add `alpha` times what a payload stands for to a vector [P], in place. Depends on no state."""

    def share(self, vector: Tensor, wire: Wire) -> tuple[Payload, list[Payload]]:
        """Return what this rank sent of its vector [P], and payloads that together stand for the sum over all ranks.

        The wire may raise; what is kept of the other ranks' values is kept only after its last call.
        """
        own = self.encode(vector)
        return own, wire.gather(own)

    def state_dict(self) -> State:
        """Return what later payloads depend on."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027  (most have no state)
        """Continue from what `state_dict` returned."""


def payload_bytes(payload: Payload) -> int:
    """Return how many bytes a payload takes on the wire."""
    return sum(part.numel() * part.element_size() for part in payload)
