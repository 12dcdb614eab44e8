"""A copy of a replay's observations in the learner's device memory: frames go up once, batches come as row numbers."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from qfleet.core.protocols import KeptRows
from qfleet.core.spec import LeafSpec
from qfleet.core.tensors import TensorBatch
from qfleet.core.types import Array, Ints
from qfleet.replay.storage import kept_name

PIECE = 4096
"""Rows that go up in one copy, at most."""
LIFTS = 3
"""Copies that may be on their way; as many as batches, so that a learner need not wait for the one before."""


class ReplayMirror:
    """The rows of one shard, by leaf, on a device; the arrays in the shard's own memory are where they come from.

    Rows are brought up and read in one order, in the queue in which the device computes, so that a row is replaced
    only after the batches that still meant its former content.
    """

    def __init__(self, leaves: Mapping[str, LeafSpec], kept: KeptRows, device: torch.device, whole: bool) -> None:
        """Look for the arrays in `kept` when the first rows are brought up: the shard has made them by then.

        With `whole` every row goes up at that time. A learner that is begun anew needs it: the shard told the former
        life what was new.
        """
        self._leaves, self._kept, self._device = leaves, kept, device
        self._columns: dict[str, _Column] = {}
        self._whole = whole

    def renew(self) -> None:
        """Bring every row up with the next ones: the shard's memory has other content now."""
        self._whole = True

    def bring_up(self, rows: Ints) -> None:
        """Copy the present content of `rows` [F]."""
        if not self._columns:
            self._open()
        if self._whole:
            rows, self._whole = np.arange(min(column.rows for column in self._columns.values())), False
        for column in self._columns.values():
            for first in range(0, len(rows), PIECE):
                column.bring_up(rows[first : first + PIECE])

    def seen(self, batch: TensorBatch) -> TensorBatch:
        """Return the batch with the observations that lie in the rows which it names in their place."""
        columns = self._columns
        observation = {name: columns[name].read(rows) for name, rows in batch.observation.items()}
        following = {name: columns[name].read(rows) for name, rows in batch.next_observation.items()}
        return dataclasses.replace(batch, observation=observation, next_observation=following)

    def _open(self) -> None:
        for name, leaf in self._leaves.items():
            source = self._kept.rows(kept_name(name), leaf.frame_shape, leaf.dtype)
            self._columns[name] = _Column(source, self._device)


class _Column:
    """One leaf: its rows, and a last one of zeros, which stands for frames before an episode's first."""

    def __init__(self, source: Array, device: torch.device) -> None:
        self._source = source
        self.rows, shape = len(source), source.shape[1:]
        dtype = torch.from_numpy(np.empty(0, source.dtype)).dtype
        self._frames = torch.zeros(self.rows + 1, *shape, dtype=dtype, device=device)
        self._words = _as_words(self._frames)
        self._lifts = deque(_Lift(shape, dtype, device) for _ in range(LIFTS))

    def bring_up(self, rows: Ints) -> None:
        """Copy `rows` [F], at most `PIECE`."""
        self._lifts[0].carry(self._source, rows, self._frames)
        self._lifts.rotate(-1)

    def read(self, rows: Tensor) -> Tensor:
        """Return the frames [B, S, ...] at `rows` [B, S], or [B, ...] at [B]; those at -1 are the last row's zeros."""
        return self._words[rows].view(self._frames.dtype).view(*rows.shape, *self._frames.shape[1:])


def _as_words(rows: Tensor) -> Tensor:
    """Return the rows as words of 8 bytes [R, W] if they consist of such: fewer, larger pieces to gather."""
    flat = rows.flatten(1)
    whole = flat.shape[1] > 0 and flat.shape[1] * flat.element_size() % 8 == 0
    return flat.view(torch.int64) if whole else flat


class _Lift:
    """Memory from which the device takes rows and their numbers by itself, so that nobody waits for it meanwhile."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._rows = torch.empty(PIECE, *shape, dtype=dtype, pin_memory=pinned)
        self._index = torch.empty(PIECE, dtype=torch.int64, pin_memory=pinned)
        self._left = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def carry(self, source: Array, rows: Ints, target: Tensor) -> None:
        """Copy `rows` [F] of the source to the same rows of the target, when what was carried before is there."""
        if self._left is not None:
            self._left.synchronize()
        staged, index = self._rows[: len(rows)], self._index[: len(rows)]
        np.take(source, rows, axis=0, out=staged.numpy(), mode="clip")  # any other mode copies twice
        index.numpy()[:] = rows
        target.index_copy_(0, index.to(target.device, non_blocking=True), staged.to(target.device, non_blocking=True))
        if self._left is not None:
            self._left.record()
