"""Turns messages and states into a small header and a list of arrays, and back; nothing here can run code.

Used by every placement that copies messages, by inline's strict mode, and by checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np
import torch

from qfleet.core.errors import CheckpointError
from qfleet.core.gradients import GRADIENT_MESSAGES
from qfleet.core.packed import PACKED_MESSAGES
from qfleet.core.types import MESSAGES, Array

_ARRAY, _TENSOR, _MESSAGE, _BIGINT, _TUPLE = range(5)
_TRAVELLING = (*MESSAGES, *GRADIENT_MESSAGES, *PACKED_MESSAGES)
_CLASSES = {cls.__name__: cls for cls in _TRAVELLING}
_FIELDS = {cls: [field.name for field in dataclasses.fields(cls)] for cls in _TRAVELLING}


def pack(value: Any) -> tuple[bytes, list[Array]]:
    """Return (header, arrays); arrays are not copied. Raises TypeError for anything that is not data."""
    packing = _Packing()
    return packing.encode(value), packing.arrays


def unpack(header: bytes, arrays: Sequence[Array]) -> Any:
    """Return the value that `pack` took apart; arrays are used as they are."""
    return _Unpacking(arrays).decode(header)


# Functions in place of the two classes would refer to each other, and keep every message's arrays until the garbage
# collector comes: megabytes, and fresh memory for the next message costs more than copying it.


class _Packing:
    """One value on its way into bytes and arrays."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []

    def encode(self, item: Any) -> bytes:
        packed: bytes = msgpack.packb(item, default=self._entry, strict_types=True)
        return packed

    def _entry(self, item: Any) -> Any:
        if isinstance(item, np.ndarray):
            if item.dtype.hasobject:
                raise TypeError("an object array is not data")
            self.arrays.append(item)
            return _array_entry(len(self.arrays) - 1)
        if type(item) in _FIELDS:
            fields = [getattr(item, name) for name in _FIELDS[type(item)]]
            return msgpack.ExtType(_MESSAGE, self.encode([type(item).__name__, fields]))
        if isinstance(item, torch.Tensor):
            name, array = _tensor_to_array(item)
            self.arrays.append(array)
            return msgpack.ExtType(_TENSOR, self.encode([len(self.arrays) - 1, name]))
        if isinstance(item, np.generic):
            return item.item()
        if isinstance(item, tuple):
            return msgpack.ExtType(_TUPLE, self.encode(list(item)))
        if isinstance(item, int):
            return msgpack.ExtType(_BIGINT, str(item).encode())
        raise TypeError(f"{type(item).__name__} is not data and cannot be sent or saved")


class _Unpacking:
    """One value on its way back."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays

    def decode(self, data: bytes) -> Any:
        return msgpack.unpackb(data, ext_hook=self._value, strict_map_key=False)

    def _value(self, code: int, data: bytes) -> Any:
        if code == _ARRAY:
            return self._arrays[_array_number(data)]
        if code == _BIGINT:
            return int(data.decode())
        content = self.decode(data)
        if code == _TENSOR:
            return _array_to_tensor(self._arrays[content[0]], content[1])
        if code == _TUPLE:
            return tuple(content)
        if code == _MESSAGE and content[0] in _CLASSES:
            return _CLASSES[content[0]](*content[1])
        raise CheckpointError(f"unknown entry of kind {code} in a header: written by another version or damaged")


def roundtrip(value: Any) -> Any:
    """Return a deep copy made by packing, copying every array, and unpacking (inline's strict mode)."""
    header, arrays = pack(value)
    return unpack(header, [np.array(a, copy=True) for a in arrays])


# Every message names its arrays 0, 1, 2 and so on: what that looks like in a header is worked out once.
@lru_cache(maxsize=1024)
def _array_entry(number: int) -> msgpack.ExtType:
    return msgpack.ExtType(_ARRAY, msgpack.packb(number))


@lru_cache(maxsize=1024)
def _array_number(data: bytes) -> int:
    number: int = msgpack.unpackb(data)
    return number


def _tensor_to_array(tensor: torch.Tensor) -> tuple[str, Array]:
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return "bfloat16", plain.view(torch.int16).numpy()
    return "", plain.numpy()


def _array_to_tensor(array: Array, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array, copy=True))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
