"""Lays a message out in one contiguous buffer and reads it back: what fills a shared-memory slot or a Ray object.

The messages of a stream hardly differ but in what their arrays hold, so types, shapes and places are worked out once.
"""

from __future__ import annotations

import math
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from qfleet.core import codec

Buffer = NDArray[np.uint8]

_ALIGNMENT = 64
_LENGTHS = Struct("<QQ")
"""At the front: the bytes of the header and of the table of arrays, which follow."""
_LAYOUTS = 1024
"""How many are remembered; the number of rows in a message may vary."""


class Layout(NamedTuple):
    """Where arrays lie, in bytes from the end of the head."""

    table: bytes
    """Their types and shapes, as they are written."""
    places: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...]
    """Of each array: where it begins, its type and shape."""
    nbytes: int
    """Of all together."""


class Frame:
    """A message taken apart and measured, ready to be written; its arrays are not copied before `write`."""

    def __init__(self, message: Any) -> None:
        header, self._arrays = codec.pack(message)
        self._layout = _laid_out(tuple([(array.dtype, array.shape) for array in self._arrays]))
        self._head = _LENGTHS.pack(len(header), len(self._layout.table)) + header + self._layout.table
        self.nbytes = _aligned(len(self._head)) + self._layout.nbytes

    def write(self, buffer: Buffer) -> None:
        """Fill the first `nbytes` bytes of a buffer whose start is aligned."""
        buffer.data[: len(self._head)] = self._head
        start = _aligned(len(self._head))
        for (offset, dtype, shape), array in zip(self._layout.places, self._arrays, strict=True):
            np.ndarray(shape, dtype, buffer, start + offset)[...] = array

    def to_buffer(self) -> Buffer:
        """Return the frame in a new buffer."""
        buffer = empty(self.nbytes)
        self.write(buffer)
        return buffer


class Sealed:
    """A frame that was written elsewhere, to be written here as it is."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.nbytes = buffer.size

    def write(self, buffer: Buffer) -> None:
        """Fill the first `nbytes` bytes of a buffer whose start is aligned."""
        np.copyto(buffer[: self.nbytes], self._buffer)


def read(buffer: Buffer) -> Any:
    """Return the message in a buffer; its arrays are views into the buffer, contiguous and aligned if its start is."""
    header_begin, content = _LENGTHS.size, buffer.data
    header_nbytes, table_nbytes = _LENGTHS.unpack(content[:header_begin])
    header_end = header_begin + header_nbytes
    head_end = header_end + table_nbytes
    start = _aligned(head_end)
    places = _written_layout(bytes(content[header_end:head_end])).places
    arrays = [np.ndarray(shape, dtype, buffer, start + offset) for offset, dtype, shape in places]
    return codec.unpack(bytes(content[header_begin:header_end]), arrays)


def copy(buffer: Buffer) -> Buffer:
    """Return a writable copy with an aligned start."""
    fresh = empty(buffer.size)
    np.copyto(fresh, buffer)
    return fresh


def empty(nbytes: int) -> Buffer:
    """Return an uninitialised buffer with an aligned start."""
    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    return room[begin : begin + nbytes]


@lru_cache(maxsize=_LAYOUTS)
def _laid_out(forms: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]) -> Layout:
    """Return the layout of arrays of these types and shapes."""
    places, end = [], 0
    for dtype, shape in forms:
        if dtype.kind == "V":
            raise TypeError(f"an array of {dtype} cannot be sent: only plain number types travel")
        places.append((end, dtype, shape))
        end += _aligned(math.prod(shape) * dtype.itemsize)
    table: bytes = msgpack.packb([[dtype.str, shape] for dtype, shape in forms])
    return Layout(table, tuple(places), end)


@lru_cache(maxsize=_LAYOUTS)
def _written_layout(table: bytes) -> Layout:
    """Return the layout that a table tells of."""
    return _laid_out(tuple((np.dtype(name), tuple(shape)) for name, shape in msgpack.unpackb(table)))


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
