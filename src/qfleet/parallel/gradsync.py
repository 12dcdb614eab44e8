"""A group of learner ranks that sum their gradients: torch's gloo collectives, beside any group the user has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous as meet

_LOOPBACK = "127.0.0.1"


class GradientGroup:
    """One rank of a group. Every collective must be called by all ranks, in the same order, with equal shapes.

    `rendezvous` is where the ranks meet: `file:///path` (one machine, a file that does not exist yet) or
    `tcp://host:port` of rank 0. A rank waits at most `timeout_s` seconds for the others, there and in each collective.
    """

    def __init__(self, rank: int, size: int, rendezvous: str, timeout_s: float) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of a group of {size}")
        self.rank, self.size = rank, size
        timeout = timedelta(seconds=timeout_s)
        with self._explained(f"meeting at {rendezvous}"):
            self._store, _, _ = next(meet(rendezvous, rank, size, timeout=timeout))
            self._store.set_timeout(timeout)
            gloo: Any = distributed.ProcessGroupGloo  # torch's own stubs leave out most of it
            options = gloo._Options()
            options._devices = [
                gloo.create_device(hostname=_LOOPBACK) if _local(rendezvous) else gloo.create_default_device()
            ]
            options._timeout = timeout
            self._group = gloo(self._store, rank, size, options)

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a contiguous CPU tensor by its sum over all ranks; every rank gets the same bits."""
        with self._explained("all-reduce"):
            self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous CPU tensors of all ranks, which have one shape, in the order of ranks."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._explained("all-gather"):
            self._group.allgather([gathered], [tensor]).wait()
        return gathered

    def close(self) -> None:
        """Leave the group; the others fail at their next collective."""
        self._group.abort()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            who = f"rank {self.rank} of {self.size}"
            raise ConnectionError(f"{who}: {what} failed, another rank may be gone: {error}") from error


def _local(rendezvous: str) -> bool:
    """Return whether all ranks are on one machine: loopback needs no host name that resolves."""
    return rendezvous.startswith(("file:", f"tcp://{_LOOPBACK}:", "tcp://localhost:"))
