"""Block sizes of the Nature network's kernels, by batch size; what `benchmarks/gpu/nature_update.py` found best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from qfleet.accel.kernels.conv import Tile


@dataclass(frozen=True)
class NatureTiles:
    """One entry for each launch, and into how many partial sums the gradients of the weights are split."""

    conv1: Tile
    conv2: Tile
    conv3: Tile
    dense: Tile
    dense_splits: int
    """About so many parts of the dense layer's sums: see `parts_of_sums`."""
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


def tiles_for(batch: int, dtype: torch.dtype = torch.bfloat16) -> NatureTiles:
    """Return the block sizes for a batch of transitions, and operands of a type."""
    tiles = _SMALL if batch <= 128 else _MIDDLE if batch <= 512 else _LARGE
    if dtype.itemsize == 2:
        return tiles
    changes: dict[str, Any] = {name: for_float32(tile) for name, tile in vars(tiles).items() if isinstance(tile, Tile)}
    return replace(tiles, **changes)


def for_float32(tile: Tile) -> Tile:
    """Return the block for operands twice as wide, of half the depth: it reads ahead as many bytes as it was tuned for.

    With a single stage it reads nothing ahead.
    """
    return tile if tile.stages == 1 else tile._replace(depth=tile.depth // 2)


def parts_of_sums(wanted: int, pixels: int) -> int:
    """Return the number nearest to `wanted`, by their ratio, that divides the pixels of the dense layer's input.

    It is at most twice `wanted`: a program of the last layer has an image's parts in its memory all at once.
    """
    return min(
        (parts for parts in range(1, 2 * wanted + 1) if pixels % parts == 0),
        key=lambda parts: max(parts, wanted) / min(parts, wanted),
    )
