"""The losses of replay agents as one launch each: targets, errors, priorities and the gradient of the prediction.

They compute what `algo.losses` computes, in float32 from outputs of any float type, and its backward pass as well:
the gradient that a network's backward pass starts from is written directly, weighted and divided by the batch size.
A batch's tensors must be contiguous; outputs may have any strides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor

from qfleet.accel.kernels.loss_programs import categorical_kernel, quantile_kernel, scalar_kernel
from qfleet.algo.agent import ReplayAgent
from qfleet.core.tensors import TensorBatch

_ROWS = 32
"""Samples in one program of the scalar kernel: a batch of 32 is one program, one of 1024 has 32 side by side."""
_GOALS = 32
"""Goals that one round of the quantile kernel compares with all predictions: more would not fit the registers."""


@dataclass(frozen=True)
class Outputs:
    """What the networks say of a batch: [B, A] from scalar heads, [B, A, N] from others; N may differ among them."""

    predicted: Tensor
    """The online network's output for the states."""
    following: Tensor
    """The target network's output for the next states."""
    choosing: Tensor | None = None
    """What the next action is chosen by, if that is not `following`: the online network's output for the next states
    (double), or the target network's at the fractions of acting (implicit quantiles)."""
    present: Tensor | None = None
    """The target network's output for the states, as it acts; for Munchausen agents and no others."""


@dataclass(frozen=True)
class LossBuffers:
    """Where a launch leaves its results; allocated once, overwritten by each launch."""

    per_sample: Tensor
    """[B] the loss of each sample, not weighted."""
    priority: Tensor
    """[B] |TD| for values, the loss itself for distributions."""
    gradient: Tensor
    """[B, A] or [B, A, N]: derivative of the weighted mean loss with respect to the prediction, in its type."""
    metrics: Tensor
    """[2] the weighted mean loss, and the mean predicted value of the actions taken."""
    terms: Tensor
    """[2, B] each sample's part of the metrics."""
    ticket: Tensor
    """[1] how many programs of a launch have ended; 0 between launches."""

    @classmethod
    def like(cls, predicted: Tensor) -> LossBuffers:
        """Return buffers for predictions [B, A] or [B, A, N] of this shape, type and device."""
        size, device = len(predicted), predicted.device
        return cls(
            per_sample=torch.empty(size, device=device),
            priority=torch.empty(size, device=device),
            gradient=torch.empty_like(predicted, requires_grad=False),
            metrics=torch.zeros(2, device=device),
            terms=torch.empty(2, size, device=device),
            ticket=torch.zeros(1, dtype=torch.int32, device=device),
        )

    @property
    def total(self) -> Tensor:
        """The weighted mean loss, a scalar."""
        return self.metrics[0]

    @property
    def q_mean(self) -> Tensor:
        """The mean predicted value of the actions taken, a scalar."""
        return self.metrics[1]


@dataclass(frozen=True)
class _Weighting:
    """How samples make up the loss."""

    weight: Tensor | None = None
    """[B]; None for equal ones."""
    size: int = 1
    """What the sum is divided by."""
    loss_scale: Tensor | None = None
    """A scalar on the device that multiplies the gradient alone, so that float16 can hold it."""


def scalar_gradient(
    agent: ReplayAgent, outputs: Outputs, batch: TensorBatch, buffers: LossBuffers, loss_scale: Tensor | None = None
) -> None:
    """Write the loss of values [B, A]; a scalar `loss_scale` multiplies the gradient alone."""
    _launch_scalar(agent, outputs, batch, _Weighting(batch.weight, batch.size, loss_scale), buffers)


def categorical_gradient(
    outputs: Outputs, support: Tensor, batch: TensorBatch, buffers: LossBuffers, loss_scale: Tensor | None = None
) -> None:
    """Write the loss of logits [B, A, N] over the evenly spaced returns `support` [N] (C51)."""
    _launch_categorical(outputs, support, batch, _Weighting(batch.weight, batch.size, loss_scale), buffers)


def quantile_gradient(
    agent: ReplayAgent,
    outputs: Outputs,
    taus: Tensor,
    batch: TensorBatch,
    buffers: LossBuffers,
    loss_scale: Tensor | None = None,
) -> None:
    """Write the loss of quantiles [B, A, N] at the fractions `taus` [B or 1, N] (QR-DQN, IQN)."""
    _launch_quantile(agent, outputs, taus, batch, _Weighting(batch.weight, batch.size, loss_scale), buffers)


def regression_gradient(
    loss: Literal["huber", "mse"],
    threshold: float,
    predicted: Tensor,
    action: Tensor,
    goal: Tensor,
    weight: Tensor | None,
    size: int,
    buffers: LossBuffers,
    loss_scale: Tensor | None = None,
) -> None:
    """Write the loss of values [B, A] of actions [B] against given goals [B]: sum of weight * error / size."""
    weighting = _Weighting(weight, size, loss_scale)
    settings = (threshold if loss == "huber" else math.inf, *_soft_settings(None))
    _launch_values((predicted, None, None, None), (action, goal, None, None, None), weighting, settings, buffers)


def _launch_scalar(
    agent: ReplayAgent, outputs: Outputs, batch: TensorBatch, weighting: _Weighting, buffers: LossBuffers
) -> None:
    tensors = (outputs.predicted, outputs.following, outputs.choosing, outputs.present)
    vectors = (batch.action, batch.reward, batch.discount, batch.mask, batch.next_mask)
    # Half the square is Huber's loss with an infinite threshold.
    threshold = agent.huber_threshold if agent.loss == "huber" else math.inf
    _launch_values(tensors, vectors, weighting, (threshold, *_soft_settings(agent, outputs)), buffers)


def _launch_values(
    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    vectors: tuple[Tensor | None, ...],
    weighting: _Weighting,
    settings: tuple[float, ...],
    buffers: LossBuffers,
) -> None:
    samples, actions = tensors[0].shape
    scalar_kernel[(triton.cdiv(samples, _ROWS),)](
        *tensors,
        *_contiguous(*vectors, weighting.weight, weighting.loss_scale),
        *_results(buffers),
        *_strides(2, *tensors, buffers.gradient),
        *(samples, actions, 1 / weighting.size),
        *settings,
        ROWS=_ROWS,
        ACTIONS=triton.next_power_of_2(actions),
    )


def _launch_categorical(
    outputs: Outputs, support: Tensor, batch: TensorBatch, weighting: _Weighting, buffers: LossBuffers
) -> None:
    tensors = (outputs.predicted, outputs.following, outputs.choosing)
    vectors = (support, batch.action, batch.reward, batch.discount, batch.next_mask)
    samples, actions, atoms = outputs.predicted.shape
    categorical_kernel[(samples,)](
        *tensors,
        *_contiguous(*vectors, weighting.weight, weighting.loss_scale),
        *_results(buffers),
        *_strides(3, *tensors, buffers.gradient),
        *(samples, actions, atoms, 1 / weighting.size),
        ATOMS=triton.next_power_of_2(atoms),
        ACTIONS=triton.next_power_of_2(actions),
    )


def _launch_quantile(
    agent: ReplayAgent,
    outputs: Outputs,
    taus: Tensor,
    batch: TensorBatch,
    weighting: _Weighting,
    buffers: LossBuffers,
) -> None:
    choosing = outputs.following if outputs.choosing is None else outputs.choosing
    tensors = (outputs.predicted, outputs.following, choosing, outputs.present)
    vectors = (taus, batch.action, batch.reward, batch.discount, batch.mask, batch.next_mask)
    samples, actions, _ = outputs.predicted.shape
    counts = [1 if tensor is None else tensor.shape[2] for tensor in tensors]
    entries = triton.next_power_of_2(max(counts))
    quantile_kernel[(samples,)](
        *tensors,
        *_contiguous(*vectors, weighting.weight, weighting.loss_scale),
        *_results(buffers),
        *_strides(3, *tensors, buffers.gradient),
        taus.stride(0) if len(taus) > 1 else 0,
        *(samples, actions, *counts, 1 / weighting.size, agent.huber_threshold),
        *_soft_settings(agent, outputs),
        ENTRIES=entries,
        GOALS=_GOALS,
        ACTIONS=triton.next_power_of_2(actions),
        num_warps=8 if entries > 128 else 4,
    )


def _soft_settings(agent: ReplayAgent | None, outputs: Outputs | None = None) -> tuple[float, float, float]:
    """Return alpha, temperature and clip; the kernels make soft targets if and only if they get `present`."""
    soft = None if agent is None else agent.munchausen
    if outputs is not None and (soft is None) != (outputs.present is None):
        raise ValueError("Outputs.present is for Munchausen agents and no others")
    return (0.0, 1.0, 0.0) if soft is None else (soft.alpha, soft.temperature, soft.clip)


def _contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(tensor is not None and not tensor.is_contiguous() for tensor in tensors):
        raise ValueError("the loss kernels read a batch's tensors as contiguous; one of them is not")
    return tensors


def _results(buffers: LossBuffers) -> tuple[Tensor, ...]:
    return (buffers.per_sample, buffers.priority, buffers.gradient, buffers.terms, buffers.metrics, buffers.ticket)


def _strides(rank: int, *tensors: Tensor | None) -> list[int]:
    return [stride for tensor in tensors for stride in ([0] * rank if tensor is None else tensor.stride())]
