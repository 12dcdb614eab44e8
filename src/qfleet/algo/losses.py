"""The losses of replay agents: per-sample errors of a network's predictions against its targets.

Nothing here weights or averages over the batch: that happens once, in `updates`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.heads import CategoricalHead, ImplicitQuantileConfig, QuantileHead
from qfleet.algo.networks import QNetwork
from qfleet.algo.targets import bellman, greedy, pick, project, soft_log_policy, soft_value
from qfleet.core.tensors import TensorBatch


@dataclass(frozen=True)
class Loss:
    """The result of `compute_loss`."""

    per_sample: Tensor
    """[B] to be weighted, summed and differentiated."""
    priority: Tensor
    """[B] detached size of each sample's error: |TD| for values, the loss itself for distributions."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Detached scalars worth watching."""


def compute_loss(agent: ReplayAgent, online: QNetwork, target: QNetwork, batch: TensorBatch) -> Loss:
    """Return the loss of the online network's predictions for the batch; `Batch.discount` already holds gamma^k."""
    if isinstance(online.head, CategoricalHead):
        return _categorical_loss(agent, online, target, batch)
    if agent.head.kind == "scalar":
        return _scalar_loss(agent, online, target, batch)
    return _quantile_loss(agent, online, target, batch)


def value_error(value: Tensor, goal: Tensor, loss: Literal["huber", "mse"], threshold: float) -> Tensor:
    """Return each entry's Huber loss (0.5 e^2 up to the threshold, then linear) or 0.5 e^2."""
    if loss == "huber":
        return F.huber_loss(value, goal, reduction="none", delta=threshold)
    return 0.5 * (value - goal).square()


def quantile_huber(prediction: Tensor, taus: Tensor, goal: Tensor, threshold: float) -> Tensor:
    """Return the quantile Huber loss [B] of predictions [B, N] at fractions taus [B or 1, N] against goals [B, M].

    Summed over predictions and averaged over goals (Dabney et al., 2018, eq. 10).
    """
    size = (-1, prediction.shape[1], goal.shape[1])
    wide_prediction, wide_goal = prediction.unsqueeze(2).expand(size), goal.unsqueeze(1).expand(size)
    huber = F.huber_loss(wide_prediction, wide_goal, reduction="none", delta=threshold)
    asymmetry = (taus.unsqueeze(2) - (wide_goal < wide_prediction).to(taus.dtype)).abs()
    return (asymmetry * huber).mean(2).sum(1) / threshold


def _scalar_loss(agent: ReplayAgent, online: QNetwork, target: QNetwork, batch: TensorBatch) -> Loss:
    goal = _goal(agent, online, target, batch, None)
    value = pick(online(batch.observation), batch.action)
    per_sample = value_error(value, goal, agent.loss, agent.huber_threshold)
    return Loss(per_sample, (goal - value.detach()).abs_(), {"q_mean": value.detach().mean()})


def _categorical_loss(agent: ReplayAgent, online: QNetwork, target: QNetwork, batch: TensorBatch) -> Loss:
    assert isinstance(target.head, CategoricalHead)
    support = target.head.support
    with torch.no_grad():
        output, q = _next(agent, online, target, batch, None)
        returns = bellman(batch.reward, batch.discount, support.expand(len(output), -1))
        goal = project(greedy(output, q, batch.next_mask).softmax(-1), returns, support)
    logits = pick(online(batch.observation), batch.action)
    per_sample = -(goal * logits.log_softmax(-1)).sum(-1)
    return Loss(per_sample, per_sample.detach(), {"q_mean": (logits.detach().softmax(-1) @ support).mean()})


def _quantile_loss(agent: ReplayAgent, online: QNetwork, target: QNetwork, batch: TensorBatch) -> Loss:
    if isinstance(online.head, QuantileHead):
        taus = online.head.taus
        goal = _goal(agent, online, target, batch, None)
        output = online(batch.observation)
    else:
        assert isinstance(agent.head, ImplicitQuantileConfig)
        goal = _goal(agent, online, target, batch, _draw_taus(online, batch, agent.head.target_taus))
        taus = _draw_taus(online, batch, agent.head.taus)
        output = online(batch.observation, taus)
    quantiles = pick(output, batch.action)
    per_sample = quantile_huber(quantiles, taus, goal, agent.huber_threshold)
    return Loss(per_sample, per_sample.detach(), {"q_mean": quantiles.detach().mean()})


@torch.no_grad()
def _goal(agent: ReplayAgent, online: QNetwork, target: QNetwork, batch: TensorBatch, taus: Tensor | None) -> Tensor:
    """Return the values [B] or samples of the return [B, N] that the predictions are drawn to."""
    output, q = _next(agent, online, target, batch, taus)
    if agent.munchausen is None:
        return bellman(batch.reward, batch.discount, greedy(output, q, batch.next_mask))
    soft = agent.munchausen
    chosen = pick(soft_log_policy(target.q(batch.observation), batch.mask, soft.temperature), batch.action)
    reward = torch.add(batch.reward, chosen.clamp(min=soft.clip), alpha=soft.alpha)
    log_policy = soft_log_policy(q, batch.next_mask, soft.temperature)
    return bellman(reward, batch.discount, soft_value(output, log_policy, soft.temperature))


def _next(
    agent: ReplayAgent, online: QNetwork, target: QNetwork, batch: TensorBatch, taus: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the target network's output [B, A, ...] for the next state and the values [B, A] to choose actions by."""
    features = target.torso(batch.next_observation)
    output = (target.head(features) if taus is None else target.head(features, taus)).float()
    if agent.double:
        return output, online.q_without_dropout(batch.next_observation)
    # With random fractions the choice gets values of its own, so that it does not favour lucky fractions.
    return output, target.head.expectation(output if taus is None else target.head(features).float())


def _draw_taus(online: QNetwork, batch: TensorBatch, count: int) -> Tensor:
    """Return random fractions [B, count] from the network's generator."""
    return torch.rand(len(batch.action), count, generator=online.generator, device=batch.action.device)
