"""Records device work once as a CUDA graph and replays it: one launch from Python for thousands of kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

WARMUPS = 3
"""Eager runs before the recording, in which libraries allocate and choose kernels. They are real work, not waste."""


class Recording:
    """Calls a function eagerly at first, then records it, then replays the record.

    The function must leave its results in tensors that stay where they are, must not wait for the device, and must do
    the same each time: numbers from Python are read once, at the recording.
    """

    def __init__(self, work: Callable[[], object], generators: Sequence[torch.Generator], enabled: bool) -> None:
        """Take all random generators that the work draws from; not `enabled`, every call is eager."""
        self._work, self._generators, self._enabled = work, generators, enabled
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream() if enabled else None  # type: ignore[no-untyped-call]

    @property
    def recorded(self) -> bool:
        """Whether calls are replays by now."""
        return self._graph is not None

    def __call__(self) -> None:
        """Do the work once."""
        if not self._enabled:
            self._work()
        elif self._graph is not None:
            self._graph.replay()
        elif self._runs < WARMUPS:
            self._runs += 1
            self._run_aside()
        else:
            self._graph = self._record()
            self._graph.replay()

    def _run_aside(self) -> None:
        """Run on a stream other than the default one, as a recording will be."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        # The end of an older graph, when the collector finds it, would spoil a recording under way.
        gc.collect()
        gc.freeze()  # torch looks for garbage here once more, a tenth of a second if it looked at everything
        gc.disable()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._work()
        finally:
            gc.enable()
            gc.unfreeze()
        return graph
