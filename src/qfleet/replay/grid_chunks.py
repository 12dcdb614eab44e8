"""Which ticks of a device's replay lie in which chunk: a checkpoint copies and writes the new ones, and names the rest.

A tick does not change any more once the windows that begin in it are complete, n ticks later; the last n are a part of
the small state. The ring overwrites the oldest ticks first, so that chunks fall out of use one after the other. New
ticks are copied off the device when the state is taken: training goes on while the copies are written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qfleet.core.chunks import Chunk
from qfleet.core.errors import CheckpointError
from qfleet.core.role import State
from qfleet.replay.grid import Grid

_SMALL_BYTES, _LARGE_BYTES = 2**14, 2**23
"""A chunk of fewer bytes than the first is written again with the next new ticks, so that its header weighs little; one
of more than the second is divided."""
_MOST_CHUNKS = 2048
"""How many a full grid has, about, however often it is saved."""


@dataclass
class _Span:
    """The ticks from `first` to before `end`, which do not go around the ring's end, and their chunk."""

    grid: Grid
    first: int
    end: int
    name: str | None = None

    def __post_init__(self) -> None:
        self._copy: State | None = None
        self.chunk = Chunk(self._give, self.name, retake=self.take)

    def take(self) -> None:
        """Copy the ticks off the device, as they are now, for whoever writes them. Waits for the device."""
        self._copy = {"columns": self.grid.read_ticks(self.first, self.end)}

    def _give(self) -> State:
        """Return the copy, which is not needed any more: what could not be written is taken again."""
        content, self._copy = self._copy, None
        if content is None:
            raise CheckpointError(f"ticks {self.first} to {self.end} of the replay were not taken for this checkpoint")
        return content


class TickChunks:
    """The chunks of one grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._small = max(math.ceil(_SMALL_BYTES / grid.tick_bytes), grid.length // _MOST_CHUNKS)
        self._large = max(2 * self._small, _LARGE_BYTES // grid.tick_bytes)
        self._spans: list[_Span] = []
        """Oldest first, one after the other without a gap."""

    def state_dict(self) -> State:
        """Return everything that the grid's future depends on; the older of its ticks are chunks. Waits for the device.

        New chunks have no name yet; one that gets none before the next call is divided anew.
        """
        grid, ticks = self._grid, int(self._grid.ticks)
        oldest, settled = grid.kept(ticks)
        self._settle(oldest)
        for span in self._spans:
            if span.chunk.name is None:  # its file was lost, and could not be written again
                span.take()
        first = self._spans[-1].end if self._spans else oldest
        while first < settled:
            end = min(first + self._large, settled, (first // grid.length + 1) * grid.length)
            self._spans.append(span := _Span(grid, first, end))
            span.take()
            first = end
        return {
            **grid.positions_dict(),
            "columns": grid.read_ticks(settled, ticks),
            "spans": [[span.first, span.end] for span in self._spans],
            "chunks": [span.chunk for span in self._spans],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict` of a grid with the same settings, or from the grid's own, as versions before had.

        What that was written to has its names, so that the next checkpoint need not write it again.
        """
        grid, self._spans = self._grid, []
        if "chunks" not in state:
            grid.load_state_dict(state)
            return
        grid.require_alike(state)
        grid.clear_rows()
        ticks = int(state["positions"][0])
        oldest, settled = grid.kept(ticks)
        for (first, end), chunk in zip(state["spans"], state["chunks"], strict=True):
            grid.write_ticks(first, max(first, oldest), chunk.read()["columns"])
            self._spans.append(_Span(grid, first, end, chunk.name))
        grid.write_ticks(settled, settled, state["columns"])
        grid.load_positions(state)

    def _settle(self, oldest: int) -> None:
        """Forget what is overwritten, and the newest chunks that were never written or are too small to stay."""
        self._spans = [span for span in self._spans if span.end > oldest]
        while self._spans and (self._spans[-1].chunk.name is None or self._is_small(self._spans[-1])):
            self._spans.pop()

    def _is_small(self, span: _Span) -> bool:
        return span.end - span.first < self._small and span.end % self._grid.length > 0
