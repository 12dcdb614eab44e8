"""Parity: a thirty-second more bytes, by which damage to one part of some data is put right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_PARTS = 32


def parity_of(data: bytes) -> bytes:
    """Return the exclusive or of the 32 equal parts of `data`, the last of them filled up with zeros."""
    size = -(-len(data) // _PARTS)
    whole = len(data) // size if size else 0
    values = np.frombuffer(data, np.uint8)
    parity: NDArray[np.uint8] = np.bitwise_xor.reduce(values[: whole * size].reshape(whole, size), axis=0, initial=0)
    parity[: len(data) - whole * size] ^= values[whole * size :]
    return parity.tobytes()


def mended(data: bytes, parity: bytes, good: Callable[[bytes], bool]) -> bytes | None:
    """Return `data` as it was when it had this parity, if only one of its parts has changed since, else None.

    Parity says what has changed but not in which part: each is tried, and `good` decides.
    """
    now = parity_of(data)
    if len(now) != len(parity) or now == parity:
        return None
    difference = np.frombuffer(now, np.uint8) ^ np.frombuffer(parity, np.uint8)
    for begin in range(0, len(data), len(parity)):
        tried = np.frombuffer(data, np.uint8).copy()
        part = tried[begin : begin + len(parity)]
        part ^= difference[: len(part)]
        if good(content := tried.tobytes()):
            return content
    return None
