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
from qfleet.core.types import MESSAGES, Array

_ARRAY, _TENSOR, _MESSAGE, _BIGINT, _TUPLE = range(5)
_CLASSES = {cls.__name__: cls for cls in MESSAGES}
_FIELDS = {cls: [field.name for field in dataclasses.fields(cls)] for cls in MESSAGES}


def pack(value: Any) -> tuple[bytes, list[Array]]:
    """Return (header, arrays); arrays are not copied. Raises TypeError for anything that is not data."""
    arrays: list[Array] = []

    def default(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            if item.dtype.hasobject:
                raise TypeError("an object array is not data")
            arrays.append(item)
            return _array_entry(len(arrays) - 1)
        if type(item) in _FIELDS:
            fields = [getattr(item, name) for name in _FIELDS[type(item)]]
            return msgpack.ExtType(_MESSAGE, encode([type(item).__name__, fields]))
        if isinstance(item, torch.Tensor):
            name, array = _tensor_to_array(item)
            arrays.append(array)
            return msgpack.ExtType(_TENSOR, encode([len(arrays) - 1, name]))
        if isinstance(item, np.generic):
            return item.item()
        if isinstance(item, tuple):
            return msgpack.ExtType(_TUPLE, encode(list(item)))
        if isinstance(item, int):
            return msgpack.ExtType(_BIGINT, str(item).encode())
        raise TypeError(f"{type(item).__name__} is not data and cannot be sent or saved")

    def encode(item: Any) -> bytes:
        packed: bytes = msgpack.packb(item, default=default, strict_types=True)
        return packed

    return encode(value), arrays


def unpack(header: bytes, arrays: Sequence[Array]) -> Any:
    """Return the value that `pack` took apart; arrays are used as they are."""

    def ext_hook(code: int, data: bytes) -> Any:
        if code == _ARRAY:
            return arrays[_array_number(data)]
        if code == _BIGINT:
            return int(data.decode())
        content = decode(data)
        if code == _TENSOR:
            return _array_to_tensor(arrays[content[0]], content[1])
        if code == _TUPLE:
            return tuple(content)
        if code == _MESSAGE and content[0] in _CLASSES:
            return _CLASSES[content[0]](*content[1])
        raise CheckpointError(f"unknown entry of kind {code} in a header: written by another version or damaged")

    def decode(data: bytes) -> Any:
        return msgpack.unpackb(data, ext_hook=ext_hook, strict_map_key=False)

    return decode(header)


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
