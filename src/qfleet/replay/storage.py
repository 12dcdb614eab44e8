"""Where observations are kept, one column a leaf: in memory, in a memory-mapped file, or compressed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field

from qfleet.core.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.spec import LeafSpec
from qfleet.core.types import Array, Ints
from qfleet.replay.compression import CompressedColumn


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

    def snapshot(self, used: int) -> Any:
        """Return the state of the rows below `used`."""

    def restore(self, state: Any) -> None:
        """Take over what `snapshot` returned."""


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

    def snapshot(self, used: int) -> Array:
        """Return a copy of the rows below `used`; of a mapped column, which need not fit the memory, a view."""
        rows = self.array[:used]
        return np.asarray(rows) if isinstance(rows, np.memmap) else rows.copy()

    def restore(self, state: Array) -> None:
        """Take over what `snapshot` returned."""
        self.array[: len(state)] = state


def ram_column(rows: int, shape: tuple[int, ...], dtype: str | np.dtype[Any]) -> PlainColumn:
    """Return a column of zeros in memory (which the system provides as it is first written)."""
    return PlainColumn(np.zeros((rows, *shape), dtype))


def observation_column(
    config: StorageConfig, leaf: LeafSpec, rows: int, segment_rows: int, directory: Path | None
) -> Column:
    """Return the column of one observation leaf for `rows` rows on the tier that `config` names."""
    if isinstance(config, Lz4Config) and config.compresses(leaf):
        return CompressedColumn(rows // segment_rows, segment_rows, leaf.frame_shape)
    if isinstance(config, MappedConfig):
        if directory is None:
            raise ConfigError("replay.storage.kind 'mapped' needs a directory for its files, and this run has none")
        directory.mkdir(parents=True, exist_ok=True)
        # without a name in the directory, the file disappears with the process, however that ends
        with tempfile.TemporaryFile(dir=directory) as file:
            mapped: Array = np.memmap(file, leaf.dtype, "w+", shape=(rows, *leaf.frame_shape))
        return PlainColumn(mapped)
    return ram_column(rows, leaf.frame_shape, leaf.dtype)
