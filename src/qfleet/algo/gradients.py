"""Where gradients come from: what an update asks for, and the plain way to get it, by automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.losses import compute_loss, value_error
from qfleet.algo.networks import QNetwork
from qfleet.algo.targets import pick
from qfleet.core.tensors import TensorBatch

DeepAgent = ReplayAgent | RolloutAgent
"""An agent whose network learns by gradients."""


@dataclass(frozen=True)
class Replayed:
    """What else came out of the gradient of a batch; the next batch may be written over it."""

    total: Tensor
    """Scalar: the weighted sum of the samples' losses, divided by the size of the whole batch."""
    priority: Tensor
    """[B] size of each sample's error."""
    metrics: dict[str, Tensor]
    """Scalars worth watching."""


class Gradient(Protocol):
    """Writes the gradient of a loss into the `gradients` of the online network's flat parameters."""

    def replay(self, batch: TensorBatch) -> Replayed:
        """Take the loss of a batch of replayed transitions."""

    def regression(
        self, observation: dict[str, Tensor], action: Tensor, goal: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take the mean error of the values of the actions [B] against the goals [B]; return it and the mean value.

        The means are weighted by `weight` [B] of zeros and ones, if there is one; of nothing, they are 0.
        """


GradientFactory = Callable[[DeepAgent, FlatParameters, QNetwork, QNetwork | None], Gradient]
"""Makes a `Gradient` for an agent, the online network and its flat parameters, and the target network if it has one."""


class EagerGradient:
    """Runs the networks as they are and differentiates automatically: works for every network and every loss."""

    def __init__(self, agent: DeepAgent, flat: FlatParameters, online: QNetwork, target: QNetwork | None) -> None:
        self._agent, self._flat, self._online, self._target = agent, flat, online, target

    def replay(self, batch: TensorBatch) -> Replayed:
        """Take the loss of a batch of replayed transitions."""
        found = self._replay_loss(batch)
        self._backward(found.total)
        return Replayed(found.total.detach(), found.priority, found.metrics)

    def regression(
        self, observation: dict[str, Tensor], action: Tensor, goal: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take the mean error of the values of the actions [B] against the goals [B]; return it and the mean value."""
        total, mean = self._regression_loss(observation, action, goal, weight)
        self._backward(total)
        return total.detach(), mean

    def _replay_loss(self, batch: TensorBatch) -> Replayed:
        assert isinstance(self._agent, ReplayAgent)
        assert self._target is not None
        loss = compute_loss(self._agent, self._online, self._target, batch)
        return Replayed(torch.dot(loss.per_sample, batch.weight) / batch.size, loss.priority, loss.metrics)

    def _regression_loss(
        self, observation: dict[str, Tensor], action: Tensor, goal: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        value = pick(self._online(observation), action).float()
        errors = value_error(value, goal, self._agent.loss, self._agent.huber_threshold)
        if weight is None:
            size = max(len(action), 1)  # a rollout may have fewer valid ticks than minibatches
            return errors.sum() / size, value.detach().sum() / size
        share = weight / weight.sum().clamp(min=1)
        return torch.dot(errors, share), torch.dot(value.detach(), share)

    def _backward(self, total: Tensor) -> None:
        self._flat.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
