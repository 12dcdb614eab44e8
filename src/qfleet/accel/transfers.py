"""Copies between a process's memory and a GPU that nobody waits for: their streams, marks and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in a queue of device work."""

    def query(self) -> bool:
        """Return whether the device has come past it."""

    def synchronize(self) -> None:
        """Wait until the device has come past it."""


class Link(Protocol):
    """A device with two queues of work: the one in which it computes, and one aside for copies."""

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of this process that the device reads and writes by itself."""

    def device(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the device."""

    def aside(self) -> AbstractContextManager[object]:
        """Return the context in which work, marks and waits belong to the queue for copies."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy; both must stay as they are until the device has come past it."""

    def mark(self) -> Mark:
        """Return the present end of the queue."""

    def wait(self, mark: Mark) -> None:
        """Let what is queued from here on wait for a mark of the other queue; the caller goes on."""


class CudaLink:
    """A GPU with a stream of its own for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Kept, as to ask torch for the present stream takes as long as to queue something there.
        self._computing = self._present = torch.cuda.current_stream(device)

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return pinned memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def device(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the GPU that belongs to the present stream."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Return the context of the stream for copies."""
        with torch.cuda.stream(self._stream):
            self._present = self._stream
            try:
                yield
            finally:
                self._present = self._computing

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        """Record an event. Whoever waits for it sleeps: actors need the core more than the learner does."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._present)
        return event

    def wait(self, mark: Mark) -> None:
        """Let the present stream wait for an event."""
        assert isinstance(mark, torch.cuda.Event)
        self._present.wait_event(mark)
