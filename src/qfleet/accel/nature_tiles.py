"""Block sizes of the Nature network's kernels, by batch size; what `benchmarks/gpu/nature_update.py` found best."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qfleet.accel.kernels.conv import Tile


@dataclass(frozen=True)
class NatureTiles:
    """One entry for each launch, and into how many partial sums the gradients of the weights are split."""

    conv1: Tile
    conv2: Tile
    conv3: Tile
    dense: Tile
    dense_splits: int
    """At most so many parts of the dense layer's sums."""
    head_together: bool
    """Whether a program of the last layer handles several images."""
    dense_input: Tile
    conv3_input: Tile
    conv2_input: Tile
    dense_weight: Tile
    conv3_weight: Tile
    conv2_weight: Tile
    conv1_weight: Tile
    conv3_splits: int
    conv2_splits: int
    conv1_splits: int
    head_splits: int


_SMALL = NatureTiles(
    conv1=Tile(128, 32, 64, 4, 4),
    conv2=Tile(64, 64, 64, 4, 5),
    conv3=Tile(64, 64, 64, 4, 3),
    dense=Tile(64, 64, 64, 4, 5),
    dense_splits=7,
    head_together=False,
    dense_input=Tile(32, 32, 128, 4, 4),
    conv3_input=Tile(64, 32, 64, 4, 5),
    conv2_input=Tile(64, 64, 64, 4, 4),
    dense_weight=Tile(64, 128, 32, 4, 1),
    conv3_weight=Tile(64, 64, 128, 4, 2),
    conv2_weight=Tile(64, 64, 64, 4, 3),
    conv1_weight=Tile(64, 64, 64, 4, 3),
    conv3_splits=16,
    conv2_splits=16,
    conv1_splits=32,
    head_splits=2,
)
_LARGE = NatureTiles(
    conv1=Tile(128, 32, 64, 4, 3),
    conv2=Tile(128, 64, 64, 4, 3),
    conv3=Tile(128, 64, 64, 4, 3),
    dense=Tile(128, 128, 64, 8, 4),
    dense_splits=1,
    head_together=True,
    dense_input=Tile(128, 64, 64, 4, 3),
    conv3_input=Tile(128, 64, 64, 4, 3),
    conv2_input=Tile(64, 128, 64, 4, 2),
    dense_weight=Tile(64, 128, 128, 4, 2),
    conv3_weight=Tile(64, 64, 128, 4, 2),
    conv2_weight=Tile(128, 64, 64, 4, 3),
    conv1_weight=Tile(128, 64, 64, 4, 3),
    conv3_splits=32,
    conv2_splits=64,
    conv1_splits=256,
    head_splits=32,
)
_MIDDLE = replace(
    _LARGE,
    conv2=Tile(256, 64, 64, 8, 3),
    dense=Tile(128, 256, 64, 8, 3),
    dense_splits=7,
    dense_input=Tile(64, 64, 64, 4, 4),
    conv3_input=Tile(64, 64, 64, 4, 3),
    head_splits=16,
)


def tiles_for(batch: int) -> NatureTiles:
    """Return the block sizes for a batch of transitions."""
    return _SMALL if batch <= 128 else _MIDDLE if batch <= 512 else _LARGE
