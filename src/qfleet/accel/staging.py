"""Batches on their way to a GPU: the next one is copied up while the device still learns from the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from qfleet.accel.transfers import Link, Mark
from qfleet.algo.batch import assemble
from qfleet.core.tensors import TensorBatch
from qfleet.core.types import Array, Batch

SLOTS = 3
"""One batch that is learned from, one that is ready, and one that is being copied."""
Result = TypeVar("Result")
Recorder = Callable[[Callable[[], object]], Callable[[], object]]
"""Returns what does a piece of work that stays in place: the work itself, or a recording of it."""


class Staging(Generic[Result]):
    """A queue of batches in a ring of slots, each with memory on both sides of the link.

    The caller waits only for the copy that last left a slot's memory on this side. The device waits by itself: the
    computation for the batch's copy, and a copy for the computation that last read the slot.
    """

    def __init__(
        self,
        link: Link,
        work: Callable[[TensorBatch], Result],
        record: Recorder,
        slots: int = SLOTS,
    ) -> None:
        """Take the work that is done with each batch; all that reads the batch must be queued when it returns."""
        self._free = deque(_Slot(link, work, record) for _ in range(slots))
        self._staged: deque[_Slot[Result]] = deque()

    def __len__(self) -> int:
        """Return how many batches are staged and not used."""
        return len(self._staged)

    @property
    def room(self) -> bool:
        """Whether one more batch can be staged."""
        return bool(self._free)

    def stage(self, batch: Batch) -> None:
        """Start a batch on its way to the device; only allowed while there is `room`. Its arrays are not kept."""
        slot = self._free.popleft()
        slot.fill(batch)
        self._staged.append(slot)

    def use(self) -> Result:
        """Do the work with the oldest batch; return what it returned."""
        slot = self._staged.popleft()
        result = slot.use()
        self._free.append(slot)
        return result


class _Slot(Generic[Result]):
    """Memory for one batch, made when it is first needed and anew where a shape changes, and the work that reads it."""

    _batch: TensorBatch
    _result: Result
    _run: Callable[[], object]
    _copied: Mark

    def __init__(self, link: Link, work: Callable[[TensorBatch], Result], record: Recorder) -> None:
        self._link, self._work, self._record = link, work, record
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """For each array of a batch, its memory on the host and on the device."""
        self._filled = 0
        self._form: list[int] = []
        """What a recording depends on: the batch's size, and the ids of its memory (new memory is made before the old
        is given up, so its id is another)."""
        self._read: Mark | None = None

    def fill(self, batch: Batch) -> None:
        """Start the copy of a batch."""
        if self._form:
            self._copied.synchronize()  # the last copy still reads the memory on this side until then
        self._filled = 0
        # Memory of the device that is made or given up here belongs to the queue for copies, like all that writes it.
        with self._link.aside():
            if self._read is not None:
                self._link.wait(self._read)
            self._batch = assemble(batch, self._put)
            self._copied = self._link.mark()
        form = [self._batch.size, *(id(device) for _, device in self._pairs[: self._filled])]
        if form != self._form:
            if self._read is not None:
                self._read.synchronize()  # the work's own memory, which is given up now, may still be in use
            self._form, self._run = form, self._record(self._do)

    def use(self) -> Result:
        """Let the device work on the batch when its copy has arrived."""
        self._link.wait(self._copied)
        self._run()
        self._read = self._link.mark()
        return self._result

    def _do(self) -> None:
        self._result = self._work(self._batch)

    def _put(self, array: Array) -> Tensor:
        """Start the copy of the batch's next array; return where it will be."""
        host, device = self._pair(array)
        np.copyto(host.numpy(), array)
        self._link.copy(device, host)
        self._filled += 1
        return device

    def _pair(self, array: Array) -> tuple[Tensor, Tensor]:
        if self._filled == len(self._pairs):
            self._pairs.append(self._made(array))
        host, _ = self._pairs[self._filled]
        if host.shape != array.shape or host.numpy().dtype != array.dtype:
            self._pairs[self._filled] = self._made(array)
        return self._pairs[self._filled]

    def _made(self, array: Array) -> tuple[Tensor, Tensor]:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        return self._link.host(array.shape, dtype), self._link.device(array.shape, dtype)
