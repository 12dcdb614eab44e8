"""The memory that environments in processes of their own share with the actor: one row of everything for each."""

from __future__ import annotations

import errno
import math
import mmap
import os
import shutil
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import QfleetError
from qfleet.core.shared_memory import REMEDY, TOO_SMALL, shared_memory_root
from qfleet.core.types import Bools, Ints, Leaves
from qfleet.envs.spaces import Layout

_ALIGNED = 64
"""Bytes: no two arrays share a cache line."""
Fields = dict[str, tuple[tuple[int, ...], Any]]


class Slots:
    """Arrays over a mapped file. The actor writes what to do, the workers what came of it, never both at once."""

    def __init__(self, layout: Layout, count: int, descriptor: int) -> None:
        fields = _fields(layout, count)
        memory = mmap.mmap(descriptor, _nbytes(fields))
        arrays: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, (shape, dtype) in fields.items():
            arrays[name] = np.ndarray(shape, dtype, memory, offset)
            offset += _room(shape, dtype)
        self.action: Ints = arrays["action"]  # [E] joint action
        self.seed: Ints = arrays["seed"]  # [E] of the next episode; negative for none
        self.reward: NDArray[np.float64] = arrays["reward"]  # [E]
        self.terminated: Bools = arrays["terminated"]  # [E]
        self.truncated: Bools = arrays["truncated"]  # [E]
        self.cpu_s: NDArray[np.float64] = arrays["cpu_s"]  # [E] processor time of the worker, now and then
        self.observation: Leaves = {leaf.name: arrays[f"observation.{leaf.name}"] for leaf in layout.leaves}
        self.final: Leaves = {leaf.name: arrays[f"final.{leaf.name}"] for leaf in layout.leaves}
        self.mask: Bools | None = arrays.get("mask")  # [E, A]
        self.final_mask: Bools | None = arrays.get("final_mask")  # [E, A]


def shared_file(layout: Layout, count: int) -> int:
    """Return the descriptor of a nameless file with room for the slots; it goes with the last process that has it."""
    root = shared_memory_root()
    nbytes = _nbytes(_fields(layout, count))
    with tempfile.TemporaryFile(dir=root) as file:
        try:
            # Reserved now: a full folder would later be a bus error, not an exception.
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            free = shutil.disk_usage(root).free
            raise QfleetError(
                f"{TOO_SMALL}: {count} environments in processes take {nbytes / 1e6:.1f} MB and {free / 1e6:.1f} MB "
                f"are free in {root}; {REMEDY}, or lower actor.envs"
            ) from error
        return os.dup(file.fileno())


def _fields(layout: Layout, count: int) -> Fields:
    """Return shape and dtype of every array, in their order."""
    fields: Fields = {
        "action": ((count,), np.int64),
        "seed": ((count,), np.int64),
        "reward": ((count,), np.float64),
        "terminated": ((count,), np.bool_),
        "truncated": ((count,), np.bool_),
        "cpu_s": ((count,), np.float64),
    }
    for leaf in layout.leaves:
        shape = (count, *leaf.spec.shape)
        fields[f"observation.{leaf.name}"] = fields[f"final.{leaf.name}"] = (shape, leaf.spec.dtype)
    if layout.spec.masked:
        fields["mask"] = fields["final_mask"] = ((count, layout.spec.actions), np.bool_)
    return fields


def _room(shape: tuple[int, ...], dtype: Any) -> int:
    nbytes = math.prod(shape) * int(np.dtype(dtype).itemsize)
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _nbytes(fields: Fields) -> int:
    return sum(_room(shape, dtype) for shape, dtype in fields.values())
