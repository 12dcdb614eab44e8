"""The memory of the Nature network's kernels for one batch size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qfleet.accel.kernels.conv import Conv
from qfleet.accel.kernels.losses import LossBuffers, Outputs
from qfleet.accel.nature_layout import NatureLayout, NatureSums
from qfleet.accel.nature_tiles import NatureTiles, parts_of_sums


class NatureBuffers:
    """Frames with their padding, activations, gradients of the states' activations, and partial sums."""

    def __init__(
        self,
        layout: NatureLayout,
        tiles: NatureTiles,
        batch: int,
        evaluations: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take how many evaluations there are: states (1), next states by the target (2) and the online network (3)."""
        self.tiles, self.online = tiles, 2 * batch if evaluations == 3 else batch
        count, units = batch * evaluations, layout.dense.outputs
        conv1 = layout.convs[0]
        kinds = min(evaluations, 2) if any(conv1.padding) else 0
        self._frames = [_PaddedFrames(conv1, batch, layout.planes, device) for _ in range(kinds)]
        # Kernels write inside the borders, which stay the zeros that they are made as.
        self.images = [
            torch.zeros(count, math.prod(conv.stored_output), conv.outputs, dtype=dtype, device=device)
            for conv in layout.convs
        ]
        self.slopes = [
            torch.zeros(batch, conv.positions, conv.outputs, dtype=dtype, device=device) for conv in layout.convs
        ]
        splits = parts_of_sums(tiles.dense_splits, layout.turned.pixels)
        self.dense_parts = torch.zeros(splits, count, units, device=device)
        self.hidden = torch.zeros(batch, units, device=device)
        self.hidden_slope = torch.zeros(batch, units, dtype=dtype, device=device)
        self.q = torch.zeros(count, layout.actions, device=device)
        choosing = self.q[batch : self.online] if evaluations == 3 else None
        self.outputs = Outputs(predicted=self.q[:batch], following=self.q[self.online :], choosing=choosing)
        self.loss = LossBuffers.like(self.outputs.predicted)
        self.sums = NatureSums(layout, tiles, device)

    def padded(self, frames: Tensor, next_frames: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return both as the first layer wants them: within its padding, if it has any."""
        if not self._frames:
            return frames, next_frames
        return self._frames[0].of(frames), None if next_frames is None else self._frames[1].of(next_frames)


class _PaddedFrames:
    """Memory for frames of bytes within the zeros that a layer sees around them."""

    def __init__(self, conv: Conv, batch: int, planes: bool, device: torch.device) -> None:
        height, width = conv.stored_input
        shape = (batch, conv.channels, height, width) if planes else (batch, height, width, conv.channels)
        self._whole = torch.zeros(shape, dtype=torch.uint8, device=device)
        rows, (above, left) = 2 if planes else 1, conv.padding
        self._inside = self._whole.narrow(rows, above, conv.height).narrow(rows + 1, left, conv.width)

    def of(self, frames: Tensor) -> Tensor:
        """Return a copy of the frames within the zeros; the next call overwrites it."""
        self._inside.copy_(frames)
        return self._whole
