"""Lays a message out in one contiguous buffer and reads it back: what fills a shared-memory slot or a Ray object."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from qfleet.core import codec

Buffer = NDArray[np.uint8]

_ALIGNMENT = 64
_LENGTH = 8
"""Bytes at the front that hold the length of the header."""


class Frame:
    """A message taken apart and measured, ready to be written; its arrays are not copied before `write`."""

    def __init__(self, message: Any) -> None:
        header, self._arrays = codec.pack(message)
        for array in self._arrays:
            if array.dtype.kind == "V":
                raise TypeError(f"an array of {array.dtype} cannot be sent: only plain number types travel")
        self._head: bytes = msgpack.packb([header, [[a.dtype.str, list(a.shape)] for a in self._arrays]])
        self.nbytes = _aligned(_LENGTH + len(self._head)) + sum(_aligned(a.nbytes) for a in self._arrays)

    def write(self, buffer: Buffer) -> None:
        """Fill the first `nbytes` bytes of a buffer whose start is aligned."""
        begin = _LENGTH + len(self._head)
        buffer[:_LENGTH] = np.frombuffer(len(self._head).to_bytes(_LENGTH, "little"), np.uint8)
        buffer[_LENGTH:begin] = np.frombuffer(self._head, np.uint8)
        offset = _aligned(begin)
        for array in self._arrays:
            place = buffer[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(place, array)
            offset += _aligned(array.nbytes)

    def to_buffer(self) -> Buffer:
        """Return the frame in a new buffer."""
        buffer = empty(self.nbytes)
        self.write(buffer)
        return buffer


def read(buffer: Buffer) -> Any:
    """Return the message in a buffer; its arrays are views into the buffer, contiguous and aligned if its start is."""
    begin = _LENGTH + int.from_bytes(buffer[:_LENGTH].tobytes(), "little")
    header, table = msgpack.unpackb(buffer[_LENGTH:begin].tobytes())
    arrays: list[Any] = []
    offset = _aligned(begin)
    for name, shape in table:
        dtype = np.dtype(name)
        nbytes = math.prod(shape) * dtype.itemsize
        arrays.append(buffer[offset : offset + nbytes].view(dtype).reshape(shape))
        offset += _aligned(nbytes)
    return codec.unpack(header, arrays)


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


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
