"""The gradient of a batch of replayed transitions through a pipeline, whose last stage has the head and the loss."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import Replayed
from qfleet.algo.losses import compute_loss
from qfleet.algo.networks import QNetwork
from qfleet.core.tensors import TensorBatch
from qfleet.parallel.mesh import Mesh
from qfleet.parallel.pipeline import Pipeline

ONLINE, TARGET = "online", "target"
"""Whose features these are, where both networks' are passed together."""


class StagedGradient:
    """Writes the gradient of one rank's share; the loss is that of the unsplit networks, one micro-batch at a time.

    The last stage's head is called with features in place of observations. Random fractions (IQN) are drawn for each
    micro-batch, so with several of them they are others than without a pipeline.
    """

    def __init__(
        self,
        agent: ReplayAgent,
        flat: FlatParameters,
        heads: tuple[QNetwork, QNetwork],
        pipelines: tuple[Pipeline, Pipeline],
        mesh: Mesh,
    ) -> None:
        """Take the online and the target network's head and pipeline."""
        self._agent, self._flat, self._mesh = agent, flat, mesh
        self._online_head, self._target_head = heads
        self._online, self._target = pipelines

    def replay(self, batch: TensorBatch) -> Replayed:
        """Take the loss of a batch of replayed transitions; every rank is told it and the priorities."""
        told = self._features(batch)
        found = torch.zeros(len(batch.action) + 2, device=self._flat.parameters.device)
        priority, total, q_mean = found[:-2], found[-2], found[-1]
        share = 1 / len(batch.action)

        def micro_loss(features: Tensor, rows: Tensor) -> Tensor:
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            loss = compute_loss(self._agent, self._online_head, self._target_head, _part(told, part, features))
            result = torch.dot(loss.per_sample, told.weight[part]) / told.size
            priority[part] = loss.priority
            total.add_(result.detach())
            q_mean.add_(loss.metrics["q_mean"], alpha=len(rows) * share)
            return result

        self._flat.zero_grad()
        self._online.backward(batch.observation, micro_loss)
        self._mesh.share_(found, "pipeline", self._mesh.degrees.pipeline - 1)
        return Replayed(total, priority, {"q_mean": q_mean})

    def _features(self, batch: TensorBatch) -> TensorBatch:
        """Return the batch with the features that targets need in place of observations; only the last has them."""
        following = {TARGET: self._target.forward(batch.next_observation)}
        if self._agent.double:
            following[ONLINE] = self._online.forward(batch.next_observation)
        present = {TARGET: self._target.forward(batch.observation)} if self._agent.munchausen is not None else {}
        return dataclasses.replace(batch, observation=_known(present), next_observation=_known(following))


def _known(features: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {who: tensor for who, tensor in features.items() if tensor is not None}


def _part(batch: TensorBatch, part: slice, features: Tensor) -> TensorBatch:
    """Return some rows of a batch, whose present observations have these online features."""
    return dataclasses.replace(
        batch,
        observation={ONLINE: features, **{who: tensor[part] for who, tensor in batch.observation.items()}},
        next_observation={who: tensor[part] for who, tensor in batch.next_observation.items()},
        action=batch.action[part],
        reward=batch.reward[part],
        discount=batch.discount[part],
        weight=batch.weight[part],
        mask=None if batch.mask is None else batch.mask[part],
        next_mask=None if batch.next_mask is None else batch.next_mask[part],
    )
