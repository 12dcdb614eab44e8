"""Where rows live: each stream fills a chain of fixed-size segments, and the oldest segment of all is reused first.

Row i lies in segment i // rows at offset i % rows. Segments are handed out round the ring, so the next one in line is
always the oldest, whoever owns it; every segment of a chain but the last is full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError
from qfleet.core.role import State
from qfleet.core.types import Bools, Ints
from qfleet.replay.allocation import Allocate, zeros

NONE = -1
T = TypeVar("T", bound=np.generic)


class Chains:
    """The segments' links and owners, and for each stream where its next row goes."""

    def __init__(
        self, segments: int, rows: int, streams: int, on_evict: Callable[[Ints], None], allocate: Allocate = zeros
    ) -> None:
        """Make empty chains; `on_evict(segments)` is called while these are still linked, before they are reused."""
        self.segments, self.rows, self.on_evict = segments, rows, on_evict
        self.links = np.full((3, segments), NONE, np.int64)
        self.previous, self.next, self.owner = self.links
        self.generation = np.zeros(segments, np.int64)
        """How often each segment was handed out."""
        self.handed_out = 0
        self._reached: Ints = allocate("chains.reached", (1,), np.int64)
        """How many segments were ever handed out, known before any of them is touched, and to a later life."""
        self.tail = np.full(streams, NONE, np.int64)
        """Each stream's newest segment, NONE when it was evicted or never was."""
        self.next_row = np.full(streams, NONE, np.int64)
        """Each stream's next row, NONE when it needs a new segment."""

    def grow(self, streams: int) -> None:
        """Make room for streams below `streams`."""
        self.tail = grown(self.tail, streams, NONE)
        self.next_row = grown(self.next_row, streams, NONE)

    @property
    def filled(self) -> Ints:
        """How many rows of each segment [segments] belong to a stream."""
        filled = np.where(self.owner == NONE, 0, self.rows)
        open_rows = self.next_row[self.next_row != NONE]
        filled[open_rows // self.rows] = open_rows % self.rows
        return filled

    @property
    def used_rows(self) -> int:
        """How many rows lie in segments that were handed out: all rows below this number."""
        return min(self.handed_out, self.segments) * self.rows

    def advance(self, streams: Ints) -> Ints:
        """Return the next row [E] of each of `streams` [E] (distinct), evicting what stands in the way."""
        rows = self.next_row.take(streams)
        while (rows < 0).any():
            # a segment taken here may be the open one of another of these streams, which then needs one in turn
            self._hand_out(streams[rows < 0], len(streams))
            rows = self.next_row.take(streams)
        following = rows + 1
        following[following % self.rows == 0] = NONE
        self.next_row[streams] = following
        return rows

    def _hand_out(self, streams: Ints, group: int) -> None:
        if group > self.segments:
            raise ConfigError(
                f"replay.capacity holds {self.segments} segments of {self.rows} rows, too few for {group} environments "
                f"that write at once; raise replay.capacity or lower replay.segment"
            )
        number = self.handed_out + np.arange(len(streams))
        taken = number % self.segments
        self._reached[0] = max(self._reached[0], self.handed_out + len(streams))
        self.drop(taken)
        self.handed_out += len(streams)
        before = self.tail[streams]
        self.previous[taken], self.next[taken], self.owner[taken] = before, NONE, streams
        linked = before != NONE
        self.next[before[linked]] = taken[linked]
        self.tail[streams], self.next_row[streams] = taken, taken * self.rows
        self.generation[taken] = number // self.segments + 1

    def _evict(self, segments: Ints) -> None:
        self.on_evict(segments)
        after = self.next[segments]
        self.previous[after[after != NONE]] = NONE
        owners = self.owner[segments]
        cut_off = owners[self.tail[owners] == segments]
        self.tail[cut_off] = self.next_row[cut_off] = NONE
        self.owner[segments] = NONE

    def predecessor(self, rows: Ints, back: Ints) -> Ints:
        """Return the rows `back` steps (at most `self.rows`) before `rows`, shapes broadcast; they must be there."""
        segment, offset = np.divmod(rows, self.rows)
        before = rows - back
        return np.where(offset >= back, before, before + (self.previous.take(segment) + 1 - segment) * self.rows)

    def successor(self, rows: Ints, ahead: Ints) -> Ints:
        """Return the rows [B, T] that lie `ahead` [B, T] steps after `rows` [B]; they must be there."""
        segment, offset = np.divmod(rows, self.rows)
        hops, place = np.divmod(offset[:, None] + ahead, self.rows)
        chain = [segment]
        for _ in range(int(hops.max())):
            chain.append(self.next.take(chain[-1], mode="clip"))
        return np.take_along_axis(np.stack(chain, axis=1), hops, axis=1) * self.rows + place

    def current(self, rows: Ints, generation: Ints) -> Bools:
        """Return which of `rows` [M] still belong to the `generation` [M] that they were read in."""
        same: Bools = self.generation.take(rows // self.rows) == generation
        return same

    def has_predecessors(self, rows: Ints, back: Ints) -> Bools:
        """Return whether the `back` [M] rows before each of `rows` [M] are still there."""
        segment, offset = np.divmod(rows, self.rows)
        present: Bools = (offset >= back) | (self.previous.take(segment) != NONE)
        return present

    def state_dict(self) -> State:
        """Return the links and the streams' places."""
        used = min(self.handed_out, self.segments)
        links = {name: getattr(self, name)[:used].copy() for name in ("previous", "next", "owner", "generation")}
        return {**links, "tail": self.tail.copy(), "next_row": self.next_row.copy(), "handed_out": self.handed_out}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`."""
        for name, empty in (("previous", NONE), ("next", NONE), ("owner", NONE), ("generation", 0)):
            array = getattr(self, name)
            array[:] = empty
            array[: len(state[name])] = state[name]
        self.tail, self.next_row = np.array(state["tail"]), np.array(state["next_row"])
        self.handed_out = int(state["handed_out"])
        self._reached[0] = self.handed_out

    def ledger(self) -> State:
        """Return what a later life must know: the arrays themselves, not copies; generations follow from the rest."""
        return {"links": self.links, "tail": self.tail, "next_row": self.next_row, "handed_out": self.handed_out}

    def recover(self, ledger: State) -> Ints:
        """Go on from `ledger`; return the segments that were handed out after it, whose rows may be lost."""
        self.links[:] = ledger["links"]
        self.tail, self.next_row = np.array(ledger["tail"]), np.array(ledger["next_row"])
        self.handed_out = int(ledger["handed_out"])
        reached = int(self._reached[0])
        # what was handed out since then has its new generation now, so that a late priority is dropped
        self.generation[:] = (reached - np.arange(self.segments) + self.segments - 1) // self.segments
        later = min(reached - self.handed_out, self.segments)
        return (self.handed_out + np.arange(later)) % self.segments

    def drop(self, segments: Ints) -> None:
        """Evict those of `segments` [M] that belong to a stream."""
        owned = segments[self.owner[segments] != NONE]
        if len(owned):
            self._evict(owned)


def grown(array: NDArray[T], length: int, fill: float) -> NDArray[T]:
    """Return `array` continued with `fill` along its first axis to at least `length` entries."""
    missing = length - len(array)
    if missing <= 0:
        return array
    return np.concatenate([array, np.full((missing, *array.shape[1:]), fill, array.dtype)])
