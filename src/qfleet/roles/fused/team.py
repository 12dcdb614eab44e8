"""What the fused loops of a group do together: sum gradients and counts, and see that they are still the same."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.algo.updates import Update
from qfleet.parallel.plan import ParallelConfig
from qfleet.roles.joining import Joining, meet_group
from qfleet.roles.learner_setup import GroupConfig


class Team:
    """One loop's place among those that learn as one. Every rank makes the same calls in the same order."""

    def __init__(self, place: GroupConfig, parallel: ParallelConfig, seed: int, life: int, device: str) -> None:
        """Meet the other ranks; in each life of the group at another place."""
        self.rank = place.rank
        self._group = meet_group(place, life, device)
        self.joining = Joining(parallel, self._group, seed)
        self.apart = self.joining.apart
        self._spoiled = 0

    def attach(self, update: Update) -> None:
        """Get to know the update whose gradients, or ways, will be summed."""
        self._update = update
        self.joining.attach(update)

    def sum_(self, vector: Tensor) -> None:
        """Replace a flat vector [P] by its sum over all ranks."""
        # On a GPU this waits for the device.
        self._spoiled += not bool(vector.sum().isfinite())
        self.joining.sum_(vector)

    def total(self, count: int) -> int:
        """Return the sum of a count over all ranks."""
        return int(self._group.all_reduce_(torch.tensor([count])))

    def whole(self, value: Tensor) -> Tensor:
        """Return the sum of a scalar over all ranks, where it was, which waits for the device.

        Of ranks that learn apart, each has as much as it would with peers like itself.
        """
        if self.apart:
            return value * self._group.size
        return self._group.all_reduce_(_on_host(value)).view(()).to(value)

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest of all ranks' scalars, where it was, which waits for the device.

        Ranks that learn apart do not compare.
        """
        if self.apart:
            return value
        return torch.cat(self._group.all_gather(_on_host(value))).amax().to(value)

    def blamed(self) -> list[int]:
        """Return the ranks whose losses are known to have spoiled updates since the last call; all that skipped ask."""
        spoiled, self._spoiled = self._spoiled, 0
        if self.apart:
            return [self.rank]
        counts = self._group.all_gather(torch.tensor([spoiled]))
        return [rank for rank, count in enumerate(counts) if int(count)]

    def meet(self) -> None:
        """Raise an error if a rank has other weights than the rest, unless ranks learn apart."""
        self.joining.meet(self._update, self._update.updates)

    def common(self, stamps: tuple[int, int]) -> int:
        """Return the largest of two numbers that every rank has, too."""
        known = [set(others.tolist()) for others in self._group.all_gather(torch.tensor(stamps))]
        return int(max(set.intersection(*known)))

    def close(self) -> None:
        """Leave the group."""
        self.joining.close()


def _on_host(value: Tensor) -> Tensor:
    """Return a copy [1] of a scalar, in double precision."""
    return value.detach().to("cpu", torch.float64, copy=True).view(1)
