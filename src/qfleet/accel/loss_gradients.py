"""The gradient of replay agents with any network: automatic differentiation up to the outputs, the loss by one kernel.

Eagerly a distribution's loss is some forty small operations, there and back; compiled, torch fuses it as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.accel.gradients import WrappedGradient
from qfleet.accel.kernels.losses import (
    LossBuffers,
    Outputs,
    categorical_gradient,
    quantile_gradient,
    scalar_gradient,
)
from qfleet.accel.precision import autocast
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.gradients import DeepAgent, Replayed
from qfleet.algo.heads import CategoricalHead, ImplicitQuantileConfig, QuantileHead, ScalarHead
from qfleet.algo.networks import QNetwork
from qfleet.core.tensors import TensorBatch


def supports(network: QNetwork, agent: DeepAgent) -> bool:
    """Return whether `LossKernelGradient` can do the work: a replay agent's, without dropout.

    Next actions are chosen without dropout, but a network says only the values of such a pass and not its outputs.
    """
    return isinstance(agent, ReplayAgent) and not network.has_dropout


class LossKernelGradient(WrappedGradient):
    """Equal to the eager gradient but for rounding. What it returns lies in memory that the next call overwrites."""

    _buffers: LossBuffers | None = None

    def replay(self, batch: TensorBatch) -> Replayed:
        """Take the loss of a batch of replayed transitions."""
        with autocast(self._precision, self._device):
            outputs, taus = self._outputs(batch)
        predicted = outputs.predicted
        if self._buffers is None or self._buffers.gradient.shape != predicted.shape:
            self._buffers = LossBuffers.like(predicted)
        self._launch(outputs, taus, batch, self._buffers)
        self._flat.zero_grad()
        predicted.backward(self._buffers.gradient)  # type: ignore[no-untyped-call]
        return Replayed(self._buffers.total, self._buffers.priority, {"q_mean": self._buffers.q_mean})

    def _outputs(self, batch: TensorBatch) -> tuple[Outputs, Tensor | None]:
        """Return what the networks say, and the fractions that implicit quantiles are predicted at.

        Random numbers are drawn in the order of `algo.losses`.
        """
        agent, online, target = self._agent, self._online, self._target
        assert isinstance(agent, ReplayAgent)
        assert target is not None
        implicit = agent.head if isinstance(agent.head, ImplicitQuantileConfig) else None
        choosing = None
        with torch.no_grad():
            fractions = () if implicit is None else (self._draw(batch, implicit.target_taus),)
            features = target.torso(batch.next_observation)
            following = target.head(features, *fractions).float()
            if agent.double:
                choosing = online(batch.next_observation)
            elif implicit is not None:
                choosing = target.head(features).float()
            present = None if agent.munchausen is None else target(batch.observation)
        taus = None if implicit is None else self._draw(batch, implicit.taus)
        return Outputs(online(batch.observation, taus), following, choosing, present), taus

    def _draw(self, batch: TensorBatch, count: int) -> Tensor:
        """Return random fractions [B, count] from the network's generator."""
        return torch.rand(len(batch.action), count, generator=self._online.generator, device=batch.action.device)

    def _launch(self, outputs: Outputs, taus: Tensor | None, batch: TensorBatch, buffers: LossBuffers) -> None:
        assert isinstance(self._agent, ReplayAgent)
        scale, head = None if self._scale is None else self._scale.value, self._online.head
        if isinstance(head, CategoricalHead):
            categorical_gradient(outputs, head.support, batch, buffers, scale)
        elif isinstance(head, ScalarHead):
            scalar_gradient(self._agent, outputs, batch, buffers, scale)
        else:
            fractions = head.taus if isinstance(head, QuantileHead) else taus
            assert fractions is not None
            quantile_gradient(self._agent, outputs, fractions, batch, buffers, scale)
