"""A copy of a replay's observations in the learner's device memory: frames go up once, batches come as row numbers."""

from __future__ import annotations

import dataclasses
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
        self._source, self._device = source, device
        self.rows, shape = len(source), source.shape[1:]
        dtype = torch.from_numpy(np.empty(0, source.dtype)).dtype
        self._frames = torch.zeros(self.rows + 1, *shape, dtype=dtype, device=device)
        # pinned, so that the copies need not wait for the device
        self._staged = torch.empty(PIECE, *shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._left = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def bring_up(self, rows: Ints) -> None:
        """Copy `rows` [F], at most `PIECE`."""
        if self._left is not None:
            self._left.synchronize()  # the copy before has left the staged memory
        staged = self._staged[: len(rows)]
        np.take(self._source, rows, axis=0, out=staged.numpy(), mode="clip")  # any other mode copies twice
        index = torch.from_numpy(rows.copy()).to(self._device)
        self._frames.index_copy_(0, index, staged.to(self._device, non_blocking=True))
        if self._left is not None:
            self._left.record()

    def read(self, rows: Tensor) -> Tensor:
        """Return the frames [B, S, ...] at `rows` [B, S], or [B, ...] at [B]; those at -1 are the last row's zeros."""
        return self._frames[rows]
