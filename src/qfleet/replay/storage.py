"""Where observations are kept, one column a leaf: in memory, in a memory-mapped file, or compressed."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

import numpy as np
from pydantic import Field

from qfleet.core.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.spec import LeafSpec
from qfleet.core.types import Array, Bools, Ints
from qfleet.replay.allocation import Allocate, zeros
from qfleet.replay.compression import CompressedColumn

_SUFFIX = ".rows"


class RamConfig(Config):
    """Plain arrays in memory: the fastest."""

    kind: Literal["ram"] = "ram"


class MappedConfig(Config):
    """A memory-mapped scratch file in the run's directory: replays larger than the memory, at the disk's speed."""

    kind: Literal["mapped"] = "mapped"


class Lz4Config(Config):
    """Large uint8 leaves compressed frame by frame, losslessly; the others in memory."""

    kind: Literal["lz4"] = "lz4"
    smallest: int = Field(1024, gt=0)
    """Frames of fewer bytes are not worth compressing."""

    def compresses(self, leaf: LeafSpec) -> bool:
        """Return whether this leaf is stored compressed."""
        return leaf.dtype == "uint8" and leaf.frame_bytes >= self.smallest


StorageConfig = RamConfig | MappedConfig | Lz4Config


class Column(Protocol):
    """One value for each row."""

    def write(self, rows: Ints, values: Array) -> None:
        """Store `values` [E, ...] at `rows` [E]; within a segment rows come in order."""

    def read(self, rows: Ints) -> Array:
        """Return the values [*rows.shape, ...] at `rows` as a new contiguous array."""

    def snapshot(self, rows: Ints) -> Any:
        """Return what must be saved of `rows` [M]."""

    def clear(self) -> None:
        """Make ready for `restore`."""

    def restore(self, rows: Ints, keep: Bools, state: Any) -> None:
        """Take over those of `rows` [M] that `keep` [M] marks from what `snapshot` returned of them."""

    def recover(self, filled: Ints) -> None:
        """Go on with what a former life left, of which the first `filled` [segments] rows of each segment count."""


class PlainColumn:
    """A column that is an array, in memory or mapped."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def write(self, rows: Ints, values: Array) -> None:
        """Store values at rows, cast to the column's dtype."""
        self.array[rows] = values

    def read(self, rows: Ints) -> Array:
        """Return the values at rows."""
        return self.array.take(rows, axis=0)

    def snapshot(self, rows: Ints) -> Array:
        """Return a copy of the values at rows."""
        return np.asarray(self.array.take(rows, axis=0))

    def clear(self) -> None:
        """Do nothing: rows that are not restored belong to nobody."""

    def restore(self, rows: Ints, keep: Bools, state: Array) -> None:
        """Take over what `snapshot` returned."""
        self.array[rows[keep]] = state[keep]

    def recover(self, filled: Ints) -> None:
        """Do nothing: the rows are where they were."""


def observation_column(
    config: StorageConfig,
    name: str,
    leaf: LeafSpec,
    segments: tuple[int, int],
    directory: Path | None,
    allocate: Allocate | None,
) -> Column:
    """Return the column of one observation leaf for `segments` (number, rows of each) on the tier that `config` names.

    With `allocate` everything outlives the process: a mapped file then has a name, and goes with `remove_files`.
    """
    kept = kept_name(name)
    if isinstance(config, Lz4Config) and config.compresses(leaf):
        return CompressedColumn(*segments, leaf.frame_shape, allocate or zeros, kept)
    shape = (segments[0] * segments[1], *leaf.frame_shape)
    if not isinstance(config, MappedConfig):
        return PlainColumn((allocate or zeros)(kept, shape, leaf.dtype))
    if directory is None:
        raise ConfigError("replay.storage.kind 'mapped' needs a directory for its files, and this run has none")
    directory.mkdir(parents=True, exist_ok=True)
    if allocate is None:
        # without a name in the directory, the file disappears with the process, however that ends
        with tempfile.TemporaryFile(dir=directory) as file:
            _reserve(file.fileno(), shape, leaf.dtype, directory)
            return PlainColumn(np.memmap(file, leaf.dtype, "r+", shape=shape))
    path = directory / f"{quote(kept, safe='')}{_SUFFIX}"
    if not path.exists():
        with path.open("xb") as new:
            _reserve(new.fileno(), shape, leaf.dtype, directory)
    return PlainColumn(np.memmap(path, leaf.dtype, "r+", shape=shape))


def _reserve(descriptor: int, shape: tuple[int, ...], dtype: str, directory: Path) -> None:
    """Take all the room that a file will need: writing to a mapped file on a full disk would end the process."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.ftruncate(descriptor, 0)  # some systems keep what was reserved before the room ended
        free = shutil.disk_usage(directory).free
        raise ConfigError(
            f"replay.storage.kind 'mapped' needs {nbytes / 1e9:.2f} GB in {directory}, where {free / 1e9:.2f} GB are"
            f" free ({error.strerror}): make replay.capacity smaller, or put the run on a larger disk"
        ) from error


def kept_name(leaf: str) -> str:
    """Return the name of a leaf's column in memory that outlives the process."""
    return f"observation.{leaf}"


def remove_files(directory: Path) -> None:
    """Delete the mapped files that have a name in `directory`, and the directory if it is empty then."""
    for path in directory.glob(f"*{_SUFFIX}"):
        path.unlink()
    with contextlib.suppress(OSError):
        directory.rmdir()
