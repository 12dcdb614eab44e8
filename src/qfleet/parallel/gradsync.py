"""A group of learner ranks that sum their gradients: torch's gloo collectives, beside any group the user has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous as meet

from qfleet.core.errors import QfleetError
from qfleet.core.failpoints import failpoint

_LOOPBACK = "127.0.0.1"
_GLOOS_OWN = re.compile(r"^\[[^]]*\] |\. This is typically caused.*", re.DOTALL)
"""What gloo adds to an error that is of no use to a person here: where in its code it was, and general advice."""


class GradientGroup:
    """One rank of a group. Every collective must be called by all ranks, in the same order, with equal shapes.

    `rendezvous` is where the ranks meet: `file:///path` (one machine, a file that does not exist yet) or
    `tcp://host:port` of rank 0. A rank waits at most `timeout_s` seconds for the others, there and in each collective.
    """

    def __init__(self, rank: int, size: int, rendezvous: str, timeout_s: float) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of a group of {size}")
        self.rank, self.size, self._rendezvous = rank, size, rendezvous
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
        self.begin_all_reduce(tensor)()
        return tensor

    def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to replace a contiguous CPU tensor by its sum over all ranks; return what waits for the end of it."""
        with self._explained("all-reduce"):
            work = self._group.allreduce([tensor])

        def end() -> None:
            failpoint("group.sum")
            with self._explained("all-reduce"):
                work.wait()

        return end

    def share(self, data: bytes) -> bytes:
        """Return what rank 0 gave, on every rank."""
        size = torch.tensor([len(data) if self.rank == 0 else 0])
        self.all_reduce_(size)
        shared = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            shared.numpy()[:] = np.frombuffer(data, np.uint8)
        with self._explained("broadcast"):
            self._group.broadcast(shared, 0).wait()
        return shared.numpy().tobytes()

    def require_same(self, value: int, what: str) -> None:
        """Raise an error that names the ranks whose `value`, of which all should have the same, is another."""
        values = [int(one) for one in self.all_gather(torch.tensor([value]))]
        others = [str(rank) for rank, one in enumerate(values) if one != values[0]]
        if others:
            raise QfleetError(
                f"{what} of rank {', '.join(others)} differ from those of rank 0: they must be equal. A rank may have"
                " other versions of libraries, or faulty memory; resume from the last checkpoint"
            )

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous CPU tensors of all ranks, which have one shape, in the order of ranks."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._explained("all-gather"):
            self._group.allgather([gathered], [tensor]).wait()
        return gathered

    def close(self) -> None:
        """Leave the group; the others fail at their next collective."""
        self._group.abort()
        remove_meeting_place(self._rendezvous)

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            who, why = f"rank {self.rank} of {self.size}", _GLOOS_OWN.sub("", str(error))
            raise ConnectionError(f"{who}: {what} failed, another rank may be gone: {why}") from error


def remove_meeting_place(rendezvous: str) -> None:
    """Delete the file that ranks met by, which nobody reads once they have."""
    if rendezvous.startswith("file://"):
        Path(rendezvous.removeprefix("file://")).unlink(missing_ok=True)


def _local(rendezvous: str) -> bool:
    """Return whether all ranks are on one machine: loopback needs no host name that resolves."""
    return rendezvous.startswith(("file:", f"tcp://{_LOOPBACK}:", "tcp://localhost:"))
