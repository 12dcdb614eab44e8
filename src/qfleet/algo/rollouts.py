"""Turns a rollout into independent samples with Q(lambda) targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from qfleet.algo.agent import RolloutAgent
from qfleet.algo.batch import leaves_to_tensors, to_tensor
from qfleet.algo.networks import QNetwork
from qfleet.algo.targets import allow, lambda_returns
from qfleet.core.types import Array, Rollout


@dataclass(frozen=True)
class RolloutTensors:
    """The ticks of a rollout, in any order."""

    observation: dict[str, Tensor]  # [S, ...]
    action: Tensor  # [S]
    goal: Tensor  # [S]
    weight: Tensor | None = None  # [S] 1, or 0 for ticks that were only resets; None if there are none of these


@runtime_checkable
class GathersRows(Protocol):
    """A gradient that reads the rows of a minibatch where they lie; others get copies of them."""

    def regression_of(self, data: RolloutTensors, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Do as `Gradient.regression` for the rows `chosen` [B] of the data."""


def final_lookup(rollout: Rollout) -> dict[tuple[int, int], int]:
    """Return the row of `final_observation` for each (t, e) at which an episode ended."""
    return {(int(t), int(e)): row for row, (t, e) in enumerate(rollout.final_at)}


@torch.no_grad()
def rollout_tensors(agent: RolloutAgent, network: QNetwork, rollout: Rollout, device: torch.device) -> RolloutTensors:
    """Return the rollout's valid ticks with their targets, valued by the network as it is now (without dropout)."""
    network.eval()
    next_value = _next_values(network, rollout, device)
    network.train()
    valid = to_tensor(rollout.valid, device)
    terminated = to_tensor(rollout.terminated, device)
    continues = ~(terminated | to_tensor(rollout.truncated, device))
    continues[:-1] &= valid[1:]
    continues[-1] = False
    discount = agent.gamma * (~terminated).float()
    goal = lambda_returns(to_tensor(rollout.reward, device), discount, next_value, continues, agent.q_lambda)
    rows = to_tensor(rollout.valid.reshape(-1).nonzero()[0], device)  # found on the CPU: the device need not wait
    observation = {name: leaf[:-1].reshape(-1, *leaf.shape[2:]) for name, leaf in rollout.observation.items()}
    return RolloutTensors(
        observation={name: leaf[rows] for name, leaf in leaves_to_tensors(observation, device).items()},
        action=to_tensor(rollout.action, device).flatten()[rows],
        goal=goal.flatten()[rows],
    )


def _next_values(network: QNetwork, rollout: Rollout, device: torch.device) -> Tensor:
    """Return the greatest allowed value [T, E] of the state that each tick led to.

    That is the next tick's observation, but where an episode ended its final observation: the next one belongs to
    another episode.
    """
    ticks, environments = rollout.action.shape
    following = {name: leaf[1:].reshape(-1, *leaf.shape[2:]) for name, leaf in rollout.observation.items()}
    mask = None if rollout.mask is None else rollout.mask[1:].reshape(ticks * environments, -1)
    values = _best(network, following, mask, device).view(ticks, environments)
    if len(rollout.final_at):
        at = to_tensor(rollout.final_at, device)
        values[at[:, 0], at[:, 1]] = _best(network, rollout.final_observation, rollout.final_mask, device)
    return values


def _best(network: QNetwork, leaves: dict[str, Array], mask: Array | None, device: torch.device) -> Tensor:
    q = network.q(leaves_to_tensors(leaves, device))
    return allow(q, None if mask is None else to_tensor(mask, device)).amax(-1)
