"""Batches on their way to a GPU: the next one is copied up while the device still learns from the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from qfleet.accel.transfers import Link, Mark
from qfleet.algo.batch import arrays_of, assemble, form_of
from qfleet.core.tensors import TensorBatch
from qfleet.core.types import Array, Batch

SLOTS = 3
"""One batch that is learned from, one that is ready, and one that is being copied."""
_ALIGNED = 256
"""Bytes to a multiple of which arrays begin, as those do that the device allocates."""
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
    """Memory for one batch, made when it is first needed and anew when its form changes, and the work that reads it.

    All arrays of a batch lie in one piece, so that they go up in one copy.
    """

    _batch: TensorBatch
    _result: Result
    _run: Callable[[], object]
    _copied: Mark
    _host: Tensor
    _device: Tensor

    def __init__(self, link: Link, work: Callable[[TensorBatch], Result], record: Recorder) -> None:
        self._link, self._work, self._record = link, work, record
        self._form: tuple[object, ...] = ()
        """What memory and recording depend on: the batch's size, and its arrays' names, shapes and types."""
        self._places: list[Array] = []
        """Where each array is written, in the memory on this side."""
        self._read: Mark | None = None

    def fill(self, batch: Batch) -> None:
        """Start the copy of a batch."""
        if self._form:
            self._copied.synchronize()  # the last copy still reads the memory on this side until then
        arrays, form = arrays_of(batch), form_of(batch)
        # Memory of the device that is made or given up here belongs to the queue for copies, like all that writes it.
        with self._link.aside():
            if form != self._form:
                self._make(batch, arrays)
                self._form = form
            elif self._read is not None:
                self._link.wait(self._read)
            for place, array in zip(self._places, arrays, strict=True):
                np.copyto(place, array)
            self._link.copy(self._device, self._host)
            self._copied = self._link.mark()

    def use(self) -> Result:
        """Let the device work on the batch when its copy has arrived."""
        self._link.wait(self._copied)
        self._run()
        self._read = self._link.mark()
        return self._result

    def _do(self) -> None:
        self._result = self._work(self._batch)

    def _make(self, batch: Batch, arrays: Sequence[Array]) -> None:
        """Make memory for batches of this form, and what does the work on it."""
        if self._read is not None:
            self._read.synchronize()  # the memory that is given up now may still be in use, the work's own too
        ends = np.cumsum([-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays]).tolist()
        self._host = self._link.host((ends[-1],), torch.uint8)
        self._device = self._link.device((ends[-1],), torch.uint8)
        begins = [0, *ends[:-1]]
        self._places = [
            self._host[begin : begin + array.nbytes].numpy().view(array.dtype).reshape(array.shape)
            for begin, array in zip(begins, arrays, strict=True)
        ]
        parts = (
            self._device[begin : begin + array.nbytes].view(_dtype(array)).view(array.shape)
            for begin, array in zip(begins, arrays, strict=True)
        )
        self._batch = assemble(batch, lambda array: next(parts))
        self._run = self._record(self._do)


def _dtype(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
