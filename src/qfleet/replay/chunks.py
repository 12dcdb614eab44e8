"""Which rows lie in which chunk: a checkpoint writes the rows that are new or changed, and names the other chunks.

Every stored row has one home, the chunk with its newest values. Rows are reused in the order in which they were
written, so that chunks fall out of use one after the other. Chunks are read while the replay goes on, by whoever
writes them: rows stay as they are until their segment is reused, and what is about to be reused is copied first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from qfleet.core.chunks import Chunk
from qfleet.core.role import State
from qfleet.core.types import Bools, Ints
from qfleet.replay.segments import NONE, Chains

_SMALL_BYTES, _MOST_CHUNKS = 2**14, 2048
"""A chunk of fewer bytes than the first, or fewer rows than its share of the second, is written again with the next new
rows: the first, so that its header weighs little; the second, so that there are not too many files."""
_LARGE_BYTES = 2**23
"""What is read into memory at once; a thread that steps the replay's role may have to wait for that."""


class RowChunks:
    """The chunks of one replay; `read(rows)` returns what must be kept of rows, which take `row_bytes` each."""

    def __init__(self, chains: Chains, read: Callable[[Ints], State], row_bytes: int) -> None:
        self._chains, self._read = chains, read
        capacity = chains.segments * chains.rows
        self._small = max(_SMALL_BYTES // row_bytes, capacity // _MOST_CHUNKS)
        self._large = max(2 * self._small, _LARGE_BYTES // row_bytes)
        self._chunks: list[Chunk] = []
        self._home = np.full(capacity, NONE, np.int32)
        """For each row its chunk, NONE if it has to be written."""
        self._generation: Ints = chains.generation.copy()
        """Of each segment, when the homes of its rows were noted."""
        self._open: Ints = np.empty(0, np.int64)
        """The rows whose windows were open then: what completes a window changes the row that it began with."""
        self._copies: dict[Chunk, State] = {}
        """The content of chunks of which rows may have changed since then."""
        self._lock = threading.RLock()
        """Held while a chunk is read, so that no row of it is reused meanwhile."""

    def state_dict(self, pending: Ints) -> State:
        """Return the chunks with all stored rows, and for runs of rows their home and length.

        `pending` are the rows [M] whose windows are open (NONE is none). New chunks have no name yet; one that gets
        none before the next call is divided anew. Until then all of them can be read as they are now, by one other
        thread, too.
        """
        stored = self._forget_changed()
        self._copies = {}
        self._settle()
        self._generation, self._open = self._chains.generation.copy(), pending[pending != NONE]
        stored &= self._home == NONE
        unsettled = np.zeros_like(stored)
        unsettled[self._open] = True
        for rows in _parts(np.flatnonzero(stored & ~unsettled), self._large):
            self._add(rows)
        for rows in _parts(np.flatnonzero(stored & unsettled), self._large):
            chunk = self._add(rows)
            self._copies[chunk] = self._content(chunk)
        return {"chunks": list(self._chunks), "home": np.stack(self._runs())}

    def load_state_dict(self, state: State, pending: Ints, place: Callable[[State, Bools], None]) -> None:
        """Read all chunks and have their content placed, with the mask of the rows that count; `chains` is as saved."""
        self._chunks, self._home = [], np.repeat(*state["home"]).astype(np.int32)
        for number, chunk in enumerate(state["chunks"]):
            content = chunk.read()
            place(content, self._home[rows_of(content["rows"])] == number)
            self._add(np.empty(0, np.int64), chunk.name)
        self._generation, self._open = self._chains.generation.copy(), pending[pending != NONE]
        self._copies = {}

    def preserve(self, segments: Ints) -> None:
        """Copy the unwritten chunks that have rows of `segments` [M], which are about to be reused."""
        numbers = np.unique(self._home.reshape(self._chains.segments, -1)[segments])
        with self._lock:
            for chunk in (self._chunks[number] for number in numbers[numbers != NONE]):
                if chunk.awaited:
                    self._copies[chunk] = chunk.read()
            for chunk in [chunk for chunk in self._copies if not chunk.awaited]:
                del self._copies[chunk]

    def _add(self, rows: Ints, name: str | None = None) -> Chunk:
        """Add a chunk that is the home of `rows` [M] from now on."""
        chunk = Chunk(dict, name)
        chunk.read = partial(self._content, chunk)  # not by its number, which changes when chunks before it go
        self._home[rows] = len(self._chunks)
        self._chunks.append(chunk)
        return chunk

    def _content(self, chunk: Chunk) -> State:
        with self._lock:
            if (copy := self._copies.get(chunk)) is not None:
                return copy
            rows = np.flatnonzero(self._home == self._chunks.index(chunk))
            return {"rows": runs_of(rows), **self._read(rows)}

    def _forget_changed(self) -> Bools:
        """Take their home from rows that changed; return for each row whether it belongs to a stream."""
        chains = self._chains
        filled = chains.filled
        stored: Bools = np.arange(chains.rows) < filled[:, None]
        by_segment = self._home.reshape(chains.segments, chains.rows)
        by_segment[chains.generation != self._generation] = NONE
        for segment in np.flatnonzero(filled < chains.rows):
            by_segment[segment, filled[segment] :] = NONE
        self._home[self._open] = NONE
        return stored.ravel()

    def _runs(self) -> tuple[Ints, Ints]:
        """Return for runs of rows [K] their home and length; there are few of them, and rows may be a million."""
        begins = np.concatenate([[0], np.flatnonzero(self._home[1:] != self._home[:-1]) + 1])
        return self._home[begins].astype(np.int64), np.diff(begins, append=len(self._home))

    def _settle(self) -> None:
        """Keep the chunks that stay as they are; rows of others have to be written.

        Those without rows go. The newest ones are divided anew if they were never written, or are so small that
        frequent checkpoints would leave very many of them.
        """
        homes, lengths = self._runs()
        counts = np.bincount(homes + 1, lengths, len(self._chunks) + 1)[1:]
        end = len(self._chunks)
        while end and (self._chunks[end - 1].name is None or counts[end - 1] < self._small):
            end -= 1
        stays = counts[:end] > 0
        number = np.full(len(self._chunks) + 1, NONE)  # its last entry is that of NONE
        number[:end][stays] = np.arange(np.count_nonzero(stays))
        self._chunks = [chunk for chunk, there in zip(self._chunks, stays, strict=False) if there]
        self._home = np.repeat(number[homes].astype(np.int32), lengths)


def runs_of(rows: Ints) -> Ints:
    """Return ascending `rows` [M] as first numbers and lengths [2, K] of runs without a gap."""
    begins = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    return np.stack([rows[begins], np.diff(begins, append=len(rows))])


def rows_of(runs: Ints) -> Ints:
    """Return the rows that `runs_of` took."""
    first, length = runs
    skipped = first - (np.cumsum(length) - length)
    rows: Ints = np.repeat(skipped, length) + np.arange(int(length.sum()))
    return rows


def _parts(rows: Ints, size: int) -> list[Ints]:
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]
