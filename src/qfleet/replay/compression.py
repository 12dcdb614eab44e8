"""A column of uint8 frames as LZ4 blocks in one growing arena, any single frame decodable.

The first frame of a segment is the dictionary of the others, which mostly repeat it. The arena is handed out by pages,
each of which belongs to one segment until that is written anew. Which pages are free is known from where the blocks of
the rows lie: nothing else has to outlive the process.
"""

from __future__ import annotations

import math
from typing import Any

import lz4.block
import numpy as np

from qfleet.core.types import Array, Bools, Ints
from qfleet.replay.allocation import Allocate, zeros

_PAGE_BYTES, _CHUNK_BYTES = 2**15, 2**24
"""About what a page has, and what the arena grows by."""

Block = bytes | memoryview


class CompressedColumn:
    """Frames by row; rows of one segment must be written in order, from its first."""

    def __init__(
        self, segments: int, rows: int, shape: tuple[int, ...], allocate: Allocate = zeros, name: str = "frames"
    ) -> None:
        """Make an empty column for `segments` segments of `rows` frames of `shape`; its arrays begin with `name`."""
        self.rows, self.shape, self.frame_bytes = rows, shape, math.prod(shape)
        self._allocate, self._name = allocate, name
        longest = self.frame_bytes + self.frame_bytes // 255 + 16  # what LZ4 makes of noise
        self.page = min(max(_PAGE_BYTES, 4 * longest), rows * longest)
        most = segments * -(-rows // (self.page // longest))
        self._chunk_pages = min(-(-_CHUNK_BYTES // self.page), most)
        self.where = allocate(f"{name}.where", (segments * rows,), np.int64)
        """For each row the byte of the arena at which its block begins."""
        self.length = allocate(f"{name}.length", (segments * rows,), np.int64)
        self._chunks: list[memoryview] = []
        self._empty(segments)

    def _empty(self, segments: int) -> None:
        self._free = list(range(len(self._chunks) * self._chunk_pages))
        self._pages: list[list[int]] = [[] for _ in range(segments)]
        self._end, self._room = [0] * segments, [0] * segments
        """Where each segment's next block goes, and how many bytes are left of its last page."""
        self.filled = [0] * segments
        """How many rows of each segment are written."""
        self._first: list[memoryview] = [memoryview(b"")] * segments
        """Each segment's first frame."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pages that are in use."""
        return self.page * sum(len(pages) for pages in self._pages)

    def write(self, rows: Ints, values: Array) -> None:
        """Compress `values` [E, *shape] into `rows` [E]."""
        for row, frame in zip(rows.tolist(), np.ascontiguousarray(values), strict=True):
            segment, offset = divmod(row, self.rows)
            if offset == 0:
                self._release(segment)
                self._put(row, frame.tobytes())  # the dictionary itself stays plain
                self._first[segment] = self._block(row)
            else:
                self._put(row, lz4.block.compress(frame.tobytes(), store_size=False, dict=self._first[segment]))

    def _release(self, segment: int) -> None:
        self._free += self._pages[segment]
        self._pages[segment], self._room[segment], self.filled[segment] = [], 0, 0

    def _put(self, row: int, block: Block) -> None:
        segment, size = row // self.rows, len(block)
        if size > self._room[segment]:
            if not self._free:
                self._grow()
            page = self._free.pop()
            self._pages[segment].append(page)
            self._end[segment], self._room[segment] = page * self.page, self.page
        at = self._end[segment]
        chunk, offset = divmod(at, self._chunk_pages * self.page)
        self._chunks[chunk][offset : offset + size] = block
        self.where[row], self.length[row] = at, size
        self._end[segment], self._room[segment] = at + size, self._room[segment] - size
        self.filled[segment] += 1

    def _grow(self) -> None:
        number, pages = len(self._chunks), self._chunk_pages
        chunk = self._allocate(f"{self._name}.arena.{number}", (pages * self.page,), np.uint8)
        self._chunks.append(chunk.data)
        self._free += range(number * pages, (number + 1) * pages)

    def _block(self, row: int) -> memoryview:
        chunk, offset = divmod(int(self.where[row]), self._chunk_pages * self.page)
        return self._chunks[chunk][offset : offset + int(self.length[row])]

    def read(self, rows: Ints) -> Array:
        """Return the frames [*rows.shape, *shape]; a frame needed several times is decoded once."""
        wanted, place = np.unique(rows, return_inverse=True)
        frames = np.empty((len(wanted), self.frame_bytes), np.uint8)
        chunk, at = divmod(self.where[wanted], self._chunk_pages * self.page)
        segment, offset = divmod(wanted, self.rows)
        end = at + self.length[wanted]
        parts = (part.tolist() for part in (chunk, at, end, segment, offset))
        decompress, size, chunks, firsts = lz4.block.decompress, self.frame_bytes, self._chunks, self._first
        for i, (number, begin, stop, home, further) in enumerate(zip(*parts, strict=True)):
            plain: Block = firsts[home]
            if further:
                plain = decompress(chunks[number][begin:stop], uncompressed_size=size, dict=plain)
            frames[i] = np.frombuffer(plain, np.uint8)
        return frames.take(place.reshape(rows.shape), axis=0).reshape(*rows.shape, *self.shape)

    def recover(self, filled: Ints) -> None:
        """Go on with what a former life left, of which the first `filled` [segments] rows of each segment count."""
        self._empty(len(filled))
        used: set[int] = set()
        for segment in np.flatnonzero(filled).tolist():
            rows = slice(segment * self.rows, segment * self.rows + int(filled[segment]))
            self._pages[segment] = list(dict.fromkeys((self.where[rows] // self.page).tolist()))
            # restored rows lie in any order: nothing of the last row's page may be written over
            last = self.where[rows] // self.page == self.where[rows][-1] // self.page
            self._end[segment] = int((self.where[rows] + self.length[rows])[last].max())
            self._room[segment] = -self._end[segment] % self.page
            self.filled[segment] = int(filled[segment])
            used.update(self._pages[segment])
        while len(self._chunks) * self._chunk_pages <= max(used, default=-1):
            self._grow()
        self._free = [page for page in self._free if page not in used]
        for segment in np.flatnonzero(filled).tolist():
            self._first[segment] = self._block(segment * self.rows)

    def snapshot(self, rows: Ints) -> Any:
        """Return the blocks of `rows` [M], one after the other, and their lengths [M]."""
        blocks = b"".join(self._block(row) for row in rows.tolist())
        return {"lengths": self.length[rows], "blocks": np.frombuffer(blocks, np.uint8)}

    def clear(self) -> None:
        """Hold no row any more."""
        self._empty(len(self.filled))

    def restore(self, rows: Ints, keep: Bools, state: Any) -> None:
        """Take over those rows that `keep` [M] marks of what `snapshot` returned; of one segment in any order."""
        content, ends = memoryview(state["blocks"]), np.cumsum(state["lengths"])
        for row, begin, end in zip(rows[keep], (ends - state["lengths"])[keep], ends[keep], strict=True):
            self._put(int(row), content[begin:end])
            if row % self.rows == 0:
                self._first[row // self.rows] = self._block(row)
