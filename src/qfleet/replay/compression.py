"""A column of uint8 frames as LZ4 blocks: one byte arena for each full segment, any single frame decodable.

The first frame of a segment is the dictionary of the others, which mostly repeat it.
"""

from __future__ import annotations

import math
from typing import Any

import lz4.block
import numpy as np

from qfleet.core.types import Array, Ints

Block = bytes | memoryview


class CompressedColumn:
    """Frames by row; rows of one segment must be written in order, from its first."""

    def __init__(self, segments: int, rows: int, shape: tuple[int, ...]) -> None:
        """Make an empty column for `segments` segments of `rows` frames of `shape`."""
        self.rows, self.shape, self.frame_bytes = rows, shape, math.prod(shape)
        self.blocks: list[list[Block]] = [[] for _ in range(segments)]
        """For each segment its blocks; once the segment is full they are slices of one arena."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(len(block) for blocks in self.blocks for block in blocks)

    def write(self, rows: Ints, values: Array) -> None:
        """Compress `values` [E, *shape] into `rows` [E]."""
        for row, frame in zip(rows.tolist(), np.ascontiguousarray(values), strict=True):
            segment, offset = divmod(row, self.rows)
            blocks = self.blocks[segment]
            if offset == 0:
                blocks.clear()
                blocks.append(frame.tobytes())  # the dictionary itself stays plain
            else:
                blocks.append(lz4.block.compress(frame.tobytes(), store_size=False, dict=blocks[0]))
            if len(blocks) == self.rows:
                self.blocks[segment] = _in_one_arena(blocks)

    def read(self, rows: Ints) -> Array:
        """Return the frames [*rows.shape, *shape]; a frame needed several times is decoded once."""
        wanted, place = np.unique(rows, return_inverse=True)
        frames = np.empty((len(wanted), self.frame_bytes), np.uint8)
        decompress, size = lz4.block.decompress, self.frame_bytes
        for i, row in enumerate(wanted.tolist()):
            segment, offset = divmod(row, self.rows)
            blocks = self.blocks[segment]
            plain = decompress(blocks[offset], uncompressed_size=size, dict=blocks[0]) if offset else blocks[0]
            frames[i] = np.frombuffer(plain, np.uint8)
        return frames.take(place.reshape(rows.shape), axis=0).reshape(*rows.shape, *self.shape)

    def snapshot(self, used: int) -> Any:
        """Return the arenas and block lengths of the segments below row `used`."""
        lengths = [np.array([len(block) for block in blocks], np.int64) for blocks in self.blocks[: used // self.rows]]
        arenas = [np.frombuffer(b"".join(blocks), np.uint8) for blocks in self.blocks[: used // self.rows]]
        return {"lengths": lengths, "arenas": arenas}

    def restore(self, state: Any) -> None:
        """Take over what `snapshot` returned."""
        self.blocks = [[] for _ in self.blocks]
        for segment, (lengths, arena) in enumerate(zip(state["lengths"], state["arenas"], strict=True)):
            self.blocks[segment] = _slices(arena.tobytes(), lengths.tolist())


def _in_one_arena(blocks: list[Block]) -> list[Block]:
    """Return the blocks as slices of one byte string: one allocation instead of a thousand small ones."""
    return _slices(b"".join(blocks), [len(block) for block in blocks])


def _slices(arena: bytes, lengths: list[int]) -> list[Block]:
    view, ends = memoryview(arena), np.cumsum(lengths).tolist()
    return [view[end - length : end] for end, length in zip(ends, lengths, strict=True)]
