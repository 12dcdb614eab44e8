"""Runs one stage of a pipelined torso: forward for targets, forward and backward with the loss on the last stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from qfleet.core.errors import ConfigError
from qfleet.parallel.mesh import Mesh
from qfleet.parallel.stages import Cut, FirstStage, LaterStage, widths_between

ScheduleName = Literal["gpipe", "1f1b"]
"""GPipe runs all micro-batches forward, then all backward; 1F1B keeps fewer of them in memory."""
MicroLoss = Callable[[Tensor, Tensor], Tensor]
"""Returns the scalar loss of the features [b, F] of the batch's rows [b] (int64, on the host); losses are summed."""


class Pipeline:
    """One rank's stage of a torso. All ranks of the pipeline must call the same method, with equally large batches."""

    def __init__(
        self, stage: FirstStage | LaterStage, cut: Cut, mesh: Mesh, micro_batches: int, schedule: ScheduleName
    ) -> None:
        check_micro_batches(micro_batches, len(cut.stages), schedule)
        self._stage, self._widths, self._mesh = stage, widths_between(cut), mesh
        self._count, self._schedule, self._dtype = micro_batches, schedule, cut.dtype
        self._forwards: dict[int, ScheduleGPipe] = {}
        self._backwards: dict[int, ScheduleGPipe | Schedule1F1B] = {}
        self._loss: MicroLoss | None = None

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage, and so the features and the head."""
        return self._mesh.place.pipeline == len(self._widths) - 1

    def forward(self, observation: dict[str, Tensor]) -> Tensor | None:
        """Return the features [B, F] of raw leaves [B, ...] on the last stage, without gradients; None elsewhere."""
        leaves, size = self._leaves(observation), _size(observation)
        if size not in self._forwards:
            self._forwards[size] = ScheduleGPipe(self._torch_stage(leaves, size, False), self._count)
        with torch.no_grad():
            features: Tensor | None = self._forwards[size].step(*leaves)
        return features

    def backward(self, observation: dict[str, Tensor], loss: MicroLoss) -> None:
        """Add the gradient of the loss, which only the last stage calls, to that of every stage's parameters."""
        leaves, size = self._leaves(observation), _size(observation)
        if size not in self._backwards:
            kind = ScheduleGPipe if self._schedule == "gpipe" else Schedule1F1B
            stage = self._torch_stage(leaves, size, True)
            self._backwards[size] = kind(stage, self._count, self._call_loss, scale_grads=False)
        self._loss = loss
        rows = torch.arange(size) if self.last else None
        self._backwards[size].step(*leaves, target=rows)
        self._loss = None  # it holds the batch

    def _call_loss(self, features: Tensor, rows: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(features, rows)

    def _leaves(self, observation: dict[str, Tensor]) -> tuple[Tensor, ...]:
        if not isinstance(self._stage, FirstStage):
            return ()
        return tuple(observation[name] for name in self._stage.leaves)

    def _torch_stage(self, leaves: tuple[Tensor, ...], size: int, backward: bool) -> PipelineStage:
        """Return torch's stage for batches of one size; told all shapes, it need not ask the other ranks for them."""
        if size % self._count:
            raise ConfigError(
                f"{self._count} micro-batches do not divide a replica's batch of {size}: use"
                f" {', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}"
            )
        rows, index = size // self._count, self._mesh.place.pipeline

        def passed(width: int) -> Tensor:
            return torch.empty(rows, width, dtype=self._dtype, device="meta", requires_grad=backward)

        given = tuple(leaf[:rows].to("meta") for leaf in leaves) or (passed(self._widths[index - 1]),)
        return PipelineStage(
            self._stage,
            index,
            len(self._widths),
            self._mesh.device,
            given,
            passed(self._widths[index]),
            group=self._mesh.group("pipeline"),
        )


def check_micro_batches(count: int, stages: int, schedule: ScheduleName) -> None:
    """Refuse a number of micro-batches that the schedule cannot run."""
    if count < 1 or (schedule == "1f1b" and count < stages):
        least = stages if schedule == "1f1b" else 1
        raise ConfigError(
            f"{count} micro-batches are too few for {stages} stages with the schedule '{schedule}': use {least} or more"
        )


def _size(observation: dict[str, Tensor]) -> int:
    return len(next(iter(observation.values())))
