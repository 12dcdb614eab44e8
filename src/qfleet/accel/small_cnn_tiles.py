"""Block sizes of the small network's kernels, by batch size; `benchmarks/gpu/small_cnn_update.py` times others."""

from __future__ import annotations

from dataclasses import dataclass

from qfleet.accel.kernels.conv import Tile
from qfleet.accel.kernels.small_cnn import Shape

_MANY = 64
"""Blocks of rows of the dense layer that keep a device busy without sharing out the sum."""


@dataclass(frozen=True)
class SmallCnnTiles:
    """One entry for each launch, and how its work is shared out."""

    front_samples: int
    """Samples of one program of the convolution's forward pass."""
    front_warps: int
    dense: Tile
    """Of the dense layer: samples, all units, features."""
    dense_splits: int
    """Programs that share out the features of the same rows."""
    weight: Tile
    """Of the gradient of the dense layer's weight: units, features, samples. Its warps and stages are the launch's."""
    input: Tile
    """Of the gradient of the features, in the same launch: samples, features, units."""
    conv_programs: int
    """At most so many programs, and partial sums, of the convolution's backward pass."""
    conv_warps: int


def tiles_for(batch: int, shape: Shape) -> SmallCnnTiles:
    """Return the block sizes for a batch of samples."""
    units = shape.units
    rows = min(16 if batch <= 256 else 32 if batch <= 1024 else 64, 8192 // units)
    conv_warps = 4 if shape.outputs * shape.channels <= 256 else 8
    return SmallCnnTiles(
        front_samples=1 if batch <= 1024 else 4,
        front_warps=conv_warps,
        dense=Tile(rows, units, min(64, 8192 // units), 8, 3),
        dense_splits=5 if -(-batch // rows) <= _MANY else 1,
        weight=Tile(64, 32, 128, 4, 2),
        input=Tile(64, 64, 64, 4, 2),
        conv_programs=256,
        conv_warps=conv_warps,
    )
