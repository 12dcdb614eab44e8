"""Results on their way back from a GPU: read when they have arrived, while the device goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

from qfleet.accel.transfers import Link, Mark
from qfleet.core.types import Array

Label = TypeVar("Label")


class Returning(Generic[Label]):
    """Small tensors that are copied to the host in the order in which they are sent, each lot with a label.

    The copies are queued where the device computes: they are small, and so the next computation may overwrite its
    results. A lot is read only when the device has come past all of its copies.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pending: deque[tuple[Label, list[Tensor], Mark]] = deque()
        self._spare: list[list[Tensor]] = []

    def __len__(self) -> int:
        """Return how many lots were sent and not taken."""
        return len(self._pending)

    def send(self, label: Label, results: Sequence[Tensor]) -> None:
        """Start results on their way; what is queued after this may change them."""
        memory = self._memory(results)
        for host, result in zip(memory, results, strict=True):
            self._link.copy(host, result)
        self._pending.append((label, memory, self._link.mark()))

    def arrived(self, least: float = 0) -> list[tuple[Label, list[Array]]]:
        """Return the lots that have arrived since the last call, the oldest first.

        Waits until there are `least` of them, or all that were sent: all where it is infinite.
        """
        found: list[tuple[Label, list[Array]]] = []
        while self._pending and (len(found) < least or self._pending[0][2].query()):
            label, memory, mark = self._pending.popleft()
            mark.synchronize()
            found.append((label, [host.numpy().copy() for host in memory]))
            self._spare.append(memory)
        return found

    def _memory(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return memory on the host for these results: what a former lot used, if it fits."""
        memory = self._spare.pop() if self._spare else []
        if [(host.shape, host.dtype) for host in memory] == [(result.shape, result.dtype) for result in results]:
            return memory
        return [self._link.host(tuple(result.shape), result.dtype) for result in results]
