"""What predictions are drawn to: pure functions of tensors, for values, distributions, soft policies and rollouts.

Shapes: B batch items, A actions, K atoms, N quantiles, T ticks, E environments.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def allow(q: Tensor, mask: Tensor | None) -> Tensor:
    """Return q [B, A] with minus infinity where the mask [B, A] forbids; a row that forbids all is left as it is.

    Such rows occur after an episode's end, where the value is discounted by 0, and 0 times infinity is not a number.
    """
    if mask is None:
        return q
    return q.masked_fill(~mask & mask.any(-1, keepdim=True), -math.inf)


def pick(output: Tensor, action: Tensor) -> Tensor:
    """Return the entries [B] or [B, N] of output [B, A] or [B, A, N] that belong to the actions [B]."""
    if output.ndim == 2:
        return output.gather(1, action.unsqueeze(1)).squeeze(1)
    return output.gather(1, action.view(-1, 1, 1).expand(-1, 1, output.shape[2])).squeeze(1)


def greedy(output: Tensor, q: Tensor, mask: Tensor | None) -> Tensor:
    """Return the part [B] or [B, N] of output [B, A, ...] at the allowed action with the largest q [B, A]."""
    return pick(output, allow(q, mask).argmax(-1))


def bellman(reward: Tensor, discount: Tensor, value: Tensor) -> Tensor:
    """Return reward + discount * value; reward and discount are [B], the value is [B] or [B, N]."""
    if value.ndim == 2:
        reward, discount = reward.unsqueeze(1), discount.unsqueeze(1)
    return torch.addcmul(reward, discount, value)


def project(probability: Tensor, returns: Tensor, support: Tensor) -> Tensor:
    """Return the probabilities [B, K] of an even support [K] nearest to those [B, K] of the given returns [B, K].

    Each return's probability is shared between the two atoms around it, in inverse proportion to the distances;
    returns outside the support go to its ends (C51).
    """
    last = len(support) - 1
    place = (returns.clamp(support[0], support[-1]) - support[0]) * (last / (support[-1] - support[0]))
    # A return that is not a number needs a valid index; it still spoils the probabilities, and so is noticed.
    below = place.nan_to_num(0).floor_().clamp_(max=last - 1)
    upper = (place - below) * probability
    index = below.long()
    shares = torch.zeros_like(probability)
    return shares.scatter_add_(1, index, probability - upper).scatter_add_(1, index + 1, upper)


def soft_log_policy(q: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    """Return temperature * log pi [B, A] of the soft policy pi = softmax(q / temperature) among allowed actions."""
    return (allow(q, mask) / temperature).log_softmax(-1) * temperature


def soft_value(output: Tensor, log_policy: Tensor, temperature: float) -> Tensor:
    """Return the mean over actions of output [B, A] or [B, A, N] minus `soft_log_policy` [B, A], under that policy."""
    policy = (log_policy / temperature).exp()
    bonus = log_policy.masked_fill(policy == 0, 0)  # a forbidden action's is minus infinity, which 0 does not cancel
    if output.ndim == 3:
        policy, bonus = policy.unsqueeze(2), bonus.unsqueeze(2)
    return (policy * (output - bonus)).sum(1)


def lambda_returns(reward: Tensor, discount: Tensor, next_value: Tensor, continues: Tensor, q_lambda: float) -> Tensor:
    """Return Q(lambda) targets [T, E], computed backwards (Peng's form, without cuts at exploring actions).

    All arguments are [T, E]: the reward, gamma or 0 after termination, the greatest value of the state reached, and
    whether the next tick goes on from that state. Where it does not (an episode's end, the rollout's end, a tick
    that only reset the environment) the return stops at `next_value`.
    """
    reach = q_lambda * continues.to(reward.dtype)
    fixed = reward + discount * (1 - reach) * next_value
    carried = discount * reach
    returns = torch.empty_like(reward)
    following = torch.zeros_like(reward[0])
    for tick in range(len(reward) - 1, -1, -1):
        following = torch.addcmul(fixed[tick], carried[tick], following)
        returns[tick] = following
    return returns
