"""What one rank of a group can do with the others, however they are joined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from qfleet.core.errors import QfleetError


class Group(ABC):
    """One rank of a group. Every collective must be called by all ranks, in the same order, with equal shapes."""

    rank: int
    size: int

    @property
    @abstractmethod
    def transport(self) -> str:
        """By what gradients are summed, in a word."""

    @abstractmethod
    def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to replace a contiguous tensor by its sum over all ranks; return what waits for the end of it."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous tensors of all ranks, which have one shape, in the order of ranks."""

    @abstractmethod
    def share(self, data: bytes) -> bytes:
        """Return what rank 0 gave, on every rank."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group; the others fail at their next collective."""

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a contiguous tensor by its sum over all ranks; every rank gets the same bits."""
        self.begin_all_reduce(tensor)()
        return tensor

    def require_same(self, value: int, what: str) -> None:
        """Raise an error that names the ranks whose `value`, of which all should have the same, is another."""
        values = [int(one) for one in self.all_gather(torch.tensor([value]))]
        others = [str(rank) for rank, one in enumerate(values) if one != values[0]]
        if others:
            raise QfleetError(
                f"{what} of rank {', '.join(others)} differ from those of rank 0: they must be equal. A rank may have"
                " other versions of libraries, or faulty memory; resume from the last checkpoint"
            )
