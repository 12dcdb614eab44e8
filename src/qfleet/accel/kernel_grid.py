"""The prioritised replay of a device by our own kernels: one launch draws a batch, one reads each of its leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.accel.kernels.replay import FrameGrid, gather_pairs
from qfleet.accel.kernels.tree import PriorityRule, Records, descend, empty_draw, replace_rows, write_priorities
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch
from qfleet.replay.device_priorities import DevicePriorities
from qfleet.replay.grid import ACTION, AHEAD, DISCOUNT, FIELDS, REWARD, START, Grid, GridSample, close_windows
from qfleet.replay.samplers import PrioritisedConfig


class KernelGrid(Grid):
    """A grid that draws, reads and writes priorities by kernels; all else, and its state, is that of `Grid`.

    The same random numbers give the same batch as from a `Grid`, but for the last digits of its weights, and for a
    number that lies within rounding of the border between two items.
    """

    priorities: DevicePriorities

    def __init__(
        self,
        spec: EnvSpec,
        length: int,
        envs: int,
        n_step: int,
        gamma: float,
        sampler: PrioritisedConfig,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        """Make an empty grid for `envs` environments of `spec`."""
        super().__init__(spec, length, envs, n_step, gamma, sampler, device, generator)
        held, fields = self.priorities, self.fields.view(FIELDS, -1)
        self._ahead = fields[AHEAD]
        self._records = Records(fields[ACTION], fields[REWARD], fields[DISCOUNT], self.stamp, envs)
        self._rule = PriorityRule(
            highest=held.highest,
            unit=held.unit,
            fresh=held.fresh,
            alpha=sampler.alpha,
            epsilon=sampler.epsilon,
            decay=sampler.max_decay,
            ticks=self.ticks,
            span=self.most + n_step,
        )

    def sample_at(self, uniform: Tensor, beta: Tensor | float) -> GridSample:
        """Return the transitions that `uniform` [1, B] float64 in [0, 1) stands for."""
        size, device = uniform.shape[1], uniform.device
        exponent = beta if isinstance(beta, Tensor) else torch.full((), beta, device=device)
        drawn = descend(self.priorities.tree, uniform[0], exponent, self._records, empty_draw(size, device))
        pairs = {name: self._pairs(name, leaf, drawn.row) for name, leaf in self.spec.observations.items()}
        mask, next_mask = (None, None) if self.mask is None else self._masks(self.mask, drawn.row)
        batch = TensorBatch(
            observation={name: pair[0] for name, pair in pairs.items()},
            action=drawn.action,
            reward=drawn.reward,
            discount=drawn.discount,
            next_observation={name: pair[1] for name, pair in pairs.items()},
            weight=drawn.weight,
            mask=mask,
            next_mask=next_mask,
            size=size,
        )
        return GridSample(batch, drawn.row, drawn.generation)

    def update_priorities(self, index: Tensor, generation: Tensor, priority: Tensor) -> None:
        """Write the finite priorities [B] of sampled items that are still sampleable."""
        write_priorities(self.priorities.tree, index, generation, priority, self._rule)

    def _complete(self) -> None:
        """Keep what the oldest open windows came to, and make their rows sampleable; take the next rows to go out."""
        fields = close_windows(self._window, self._factors, self.gamma)
        self.fields.index_copy_(1, self._completed, fields.unsqueeze(1))
        start = self._changing.contiguous()  # positions lie in memory between other numbers
        replace_rows(self.priorities.tree, start, self._window[0, START], self.priorities.fresh)

    def _pairs(self, name: str, leaf: LeafSpec, rows: Tensor) -> Tensor:
        """Return one leaf [2, B, ...] of the observations at `rows` [B], and of those that they bootstrap from."""
        # a number is a frame of one entry to the kernel
        source = FrameGrid(
            self.frames[name].view(self.rows, *(leaf.frame_shape or (1,))), self._ages, self._ahead, self.envs
        )
        out = torch.empty(
            2, len(rows), leaf.stack, *source.frames.shape[1:], dtype=source.frames.dtype, device=rows.device
        )
        return gather_pairs(source, rows, self.n_step, leaf.stack_padding, out, channels_last=False).view(
            2, -1, *leaf.shape
        )

    @property
    def _ages(self) -> Tensor | None:
        return None if self.age is None else self.age.view(-1)

    def _masks(self, mask: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the masks [B, A] at `rows` [B], and at those that they bootstrap from."""
        ahead = (self._ahead.index_select(0, rows) * self.envs).long()
        allowed = mask.flatten(0, 1)
        return allowed.index_select(0, rows), allowed.index_select(0, (rows + ahead) % self.rows)
