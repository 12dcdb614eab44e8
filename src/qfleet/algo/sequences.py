"""The loss of recurrent agents: n-step errors of whole sequences, in rescaled units (R2D2).

Shapes: B sequences, L steps of each (burn-in and learned ones), L + 1 observations, A actions, H units of the LSTM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.batch import leaves_to_tensors, to_tensor
from qfleet.algo.losses import Loss, value_error
from qfleet.algo.networks import QNetwork
from qfleet.algo.recurrent import rescaled, unscaled
from qfleet.algo.targets import allow
from qfleet.core.types import Floats, Leaves, SequenceBatch

STATE, LAST_ACTION = "state", "last_action"
"""What is stored with each step: the LSTM's state before it, and the action before it (from 1; 0 for none)."""


@dataclass(frozen=True)
class TensorSequences:
    """Sequences on the learner's device."""

    observation: dict[str, Tensor]  # [B, L + 1, ...]
    action: Tensor  # [B, L]
    reward: Tensor  # [B, L]
    terminated: Tensor  # [B, L]
    valid: Tensor  # [B, L] false after the episode's end
    hidden: Tensor  # [B, 2 H] the LSTM's state before the first step
    last_action: Tensor  # [B, L + 1] the action before each observation, counted from 1; 0 for none
    weight: Tensor  # [B]
    mask: Tensor | None  # [B, L + 1, A]
    size: int
    """Sequences of the whole batch, over all learner ranks."""

    @property
    def fresh(self) -> Tensor:
        """Which sequences [B] are an episode's start: their state is exact, and every step is learned from."""
        return self.last_action[:, 0] == 0


def stored(state: Floats) -> Leaves:
    """Return what is kept in the replay of the memories [E, S] before a step; 16 bits are enough for a start."""
    return {STATE: state[:, :-1].astype("float16"), LAST_ACTION: state[:, -1].astype("int32")}


def sequence_tensors(batch: SequenceBatch, device: torch.device) -> TensorSequences:
    """Return the batch on the device."""
    action = to_tensor(batch.action, device)
    first = to_tensor(batch.extras[LAST_ACTION], device).long().unsqueeze(1)
    return TensorSequences(
        observation=leaves_to_tensors(batch.observation, device),
        action=action,
        reward=to_tensor(batch.reward, device),
        terminated=to_tensor(batch.terminated, device),
        valid=to_tensor(batch.valid, device),
        hidden=to_tensor(batch.extras[STATE], device).float(),
        last_action=torch.cat([first, action + 1], dim=1),
        weight=to_tensor(batch.weight, device),
        mask=None if batch.mask is None else to_tensor(batch.mask, device),
        size=batch.global_size or len(batch.action),
    )


def sequence_loss(agent: ReplayAgent, online: QNetwork, target: QNetwork, batch: TensorSequences) -> Loss:
    """Return each sequence's mean error over the steps that are learned from, and its priority."""
    assert agent.memory is not None
    output = _unroll(agent.memory.burn_in, online, batch)
    with torch.no_grad():
        following = _unroll(agent.memory.burn_in, target, batch)
        goal = n_step_goals(agent, output.detach() if agent.double else following, following, batch)
    value = output[:, :-1].gather(2, batch.action.unsqueeze(2)).squeeze(2)
    share = _shares(agent.memory.burn_in, batch)
    errors = value_error(value, goal, agent.loss, agent.huber_threshold)
    value = value.detach()
    metrics = {"q_mean": (unscaled(value) * share).sum(1).mean()}
    return Loss((errors * share).sum(1), _priority(agent.memory.eta, goal - value, share), metrics)


def first_priorities(agent: ReplayAgent, batch: SequenceBatch, value: Floats, best: Floats) -> Floats:
    """Return the priorities [B] that sequences begin with, from the values that the actor acted by.

    They are what a learner with these values would give them. `value` [B, L] is of the actions that were taken, `best`
    [B, L + 1] the highest of each observation, both in the reward's own unit. The observations are not looked at.
    """
    assert agent.memory is not None
    sequences = sequence_tensors(batch, torch.device("cpu"))
    goal = n_step_returns(agent, torch.from_numpy(best), sequences)
    error = goal - rescaled(torch.from_numpy(value))
    return _priority(agent.memory.eta, error, _shares(agent.memory.burn_in, sequences)).numpy()


def n_step_goals(agent: ReplayAgent, choosing: Tensor, valuing: Tensor, batch: TensorSequences) -> Tensor:
    """Return the rescaled n-step returns [B, L] of every step, from rescaled values [B, L + 1, A].

    Actions are chosen by the first values and valued by the second. A window ends with its sequence or its episode if
    that comes first, and bootstraps from the observation after it unless the episode terminated there.
    """
    best = allow(choosing, batch.mask).argmax(-1, keepdim=True)
    return n_step_returns(agent, unscaled(valuing.gather(2, best).squeeze(2)), batch)


def n_step_returns(agent: ReplayAgent, value: Tensor, batch: TensorSequences) -> Tensor:
    """Return the rescaled n-step returns [B, L] of every step, from the value [B, L + 1] of each observation."""
    steps = _windows(batch.valid.to(value.dtype), agent.n_step).sum(2).long()
    powers = agent.gamma ** torch.arange(agent.n_step + 1, device=value.device, dtype=value.dtype)
    returns = _windows(batch.reward * batch.valid, agent.n_step) @ powers[:-1]
    ended = _windows((batch.terminated & batch.valid).to(value.dtype), agent.n_step).amax(2)
    reached = torch.arange(steps.shape[1], device=value.device) + steps
    return rescaled(returns + powers[steps] * (1 - ended) * value.gather(1, reached))


def _shares(burn_in: int, batch: TensorSequences) -> Tensor:
    """Return how much each step [B, L] counts in its sequence: equally, but for those that only burn in."""
    burnt_in = torch.arange(batch.action.shape[1], device=batch.valid.device) >= burn_in
    learned = (batch.valid & (burnt_in | batch.fresh.unsqueeze(1))).float()
    return learned / learned.sum(1, keepdim=True).clamp(min=1)


def _priority(eta: float, error: Tensor, share: Tensor) -> Tensor:
    """Return the priority [B] of sequences: between the mean and the largest of the errors [B, L] that count."""
    sizes = error.abs()
    return torch.lerp((sizes * share).sum(1), (sizes * (share > 0)).amax(1), eta)


def _windows(values: Tensor, n_step: int) -> Tensor:
    """Return each step's own and the following values [B, L, n] of [B, L], zeros beyond the last."""
    return F.pad(values, (0, n_step - 1)).unfold(1, n_step, 1)


def _unroll(burn_in: int, network: QNetwork, batch: TensorSequences) -> Tensor:
    return network.unroll(batch.observation, batch.last_action, batch.hidden, burn_in, batch.fresh)
