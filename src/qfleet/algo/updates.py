"""One learning step for each kind of agent: what a learner does with a batch or a rollout."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from qfleet.algo.agent import AgentConfig, HardTargetConfig, ReplayAgent, RolloutAgent, TabularAgent
from qfleet.algo.batch import to_tensors
from qfleet.algo.flat import FlatParameters
from qfleet.algo.heads import TableHead
from qfleet.algo.losses import compute_loss, value_error
from qfleet.algo.networks import QNetwork
from qfleet.algo.optim import Optim, OptimConfig
from qfleet.algo.rollouts import RolloutTensors, final_lookup, rollout_tensors
from qfleet.algo.tabular import q_learning
from qfleet.algo.targets import pick
from qfleet.core.spec import PLAIN
from qfleet.core.types import Batch, Floats, Rollout

GradientHook = Callable[[Tensor], object]
"""Changes the flat gradient [P] in place between backward and step: a sum over all learner ranks, say."""


@dataclass(frozen=True)
class UpdateResult:
    """What came of one message."""

    updates: int
    """Gradient steps that were made (for a table: entries that were moved)."""
    skipped: int = 0
    """Gradient steps that were left out because loss or gradient was not finite."""
    priority: Floats | None = None
    """[B] new priorities of a batch's items; None for rollouts and skipped updates."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Scalars on the device, still to be read."""


class Update(Protocol):
    """Learns from messages; owns the networks, the optimiser and the random numbers of learning."""

    online: QNetwork
    flat: FlatParameters
    """The online network's weights, as they are published."""

    @property
    def target(self) -> QNetwork | None:
        """The target network of a replay agent."""

    @property
    def target_flat(self) -> FlatParameters | None:
        """The target network's weights."""

    @property
    def updates(self) -> int:
        """Gradient steps made since the start of the run."""

    @property
    def learning_rate(self) -> float:
        """How large the next step is; the fraction of the error for a table."""

    def __call__(self, message: Any) -> UpdateResult:
        """Learn from one Batch (replay agents) or Rollout (rollout and tabular agents)."""

    def score(self, value: float) -> None:
        """Tell the learning rate the mean return of one evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the future of this object depends on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""


def build_update(
    agent: AgentConfig,
    online: QNetwork,
    optim: OptimConfig,
    generator: torch.Generator,
    total_updates: int | None = None,
    gradient_hook: GradientHook | None = None,
) -> Update:
    """Return the update that belongs to the agent. Network and generator must already be on the learner's device."""
    if isinstance(agent, TabularAgent):
        return TabularUpdate(agent, online)
    step = GradientStep(online, optim, total_updates, gradient_hook)
    if isinstance(agent, ReplayAgent):
        return ReplayUpdate(agent, online, step, generator)
    return RolloutUpdate(agent, online, step, generator)


class GradientStep:
    """Backward, hook, clipping and optimiser for one network; leaves all as it was if anything is not finite."""

    def __init__(
        self, online: QNetwork, optim: OptimConfig, total_updates: int | None, hook: GradientHook | None
    ) -> None:
        self.flat = FlatParameters(online)
        self.optim = Optim(optim, self.flat, total_updates)
        self.count = 0
        self._hook = hook
        self._first_gradient = self.flat.gradients[:1]

    def __call__(self, loss: Tensor) -> tuple[bool, Tensor]:
        """Make one step down the scalar loss; return whether it was made, and the gradient's norm before clipping."""
        self.flat.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        # An infinite loss may have finite gradients (Huber's): it must spoil one here, so that every rank skips.
        self._first_gradient.add_(loss.detach(), alpha=0)
        if self._hook is not None:
            self._hook(self.flat.gradients)
        norm = self.optim.step(self.count)
        made = math.isfinite(norm.item())  # waits for the device; so does reading the priorities
        self.count += made
        return made, norm

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimiser and count."""
        return {"weights": self.flat.to_numpy(), "optim": self.optim.state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.flat.load_numpy(state["weights"])
        self.optim.load_state_dict(state["optim"])
        self.count = state["count"]


class _DeepUpdate:
    """What the two updates by gradients share."""

    def __init__(self, online: QNetwork, step: GradientStep, generator: torch.Generator) -> None:
        self.online = online.train()
        self.flat = step.flat
        self._step, self._generator = step, generator
        self._device = self.flat.parameters.device
        online.set_generator(generator)

    @property
    def updates(self) -> int:
        """Gradient steps made since the start of the run."""
        return self._step.count

    @property
    def learning_rate(self) -> float:
        """How large the next step is."""
        return self._step.optim.learning_rate

    def score(self, value: float) -> None:
        """Tell the learning rate the mean return of one evaluation."""
        self._step.optim.score(value)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the future of this object depends on."""
        return {"step": self._step.state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._step.load_state_dict(state["step"])
        self._generator.set_state(state["generator"])


class ReplayUpdate(_DeepUpdate):
    """One gradient step on a batch of replayed transitions, and what it means for the target network."""

    def __init__(self, agent: ReplayAgent, online: QNetwork, step: GradientStep, generator: torch.Generator) -> None:
        super().__init__(online, step, generator)
        self._agent = agent
        self.target = copy.deepcopy(online).explore()
        self.target_flat = FlatParameters(self.target)

    def __call__(self, message: Batch) -> UpdateResult:
        """Learn from one batch."""
        batch = to_tensors(message, self._device)
        if self._agent.noisy:
            self.online.resample_noise(self._generator)
            self.target.resample_noise(self._generator)
        loss = compute_loss(self._agent, self.online, self.target, batch)
        total = torch.dot(loss.per_sample, batch.weight) / batch.size
        made, norm = self._step(total)
        metrics = {"loss": total.detach(), "grad_norm": norm, **loss.metrics}
        if not made:
            return UpdateResult(0, skipped=1, metrics=metrics)
        self.online.observe(batch.observation)
        self._follow()
        return UpdateResult(1, priority=loss.priority.cpu().numpy(), metrics=metrics)

    def _follow(self) -> None:
        rule = self._agent.target
        if not isinstance(rule, HardTargetConfig):
            self.target_flat.lerp_from(self.flat, rule.tau)
        elif self.updates % rule.period == 0:
            self.target_flat.copy_from(self.flat)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the future of this object depends on."""
        return {**super().state_dict(), "target": self.target_flat.to_numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(state)
        self.target_flat.load_numpy(state["target"])


class RolloutUpdate(_DeepUpdate):
    """Epochs of gradient steps on the minibatches of one rollout (PQN).

    Each step's gradient is the mean over this rank's minibatch, so a hook that sums over ranks must divide by them.
    """

    target = None
    target_flat = None

    def __init__(self, agent: RolloutAgent, online: QNetwork, step: GradientStep, generator: torch.Generator) -> None:
        super().__init__(online, step, generator)
        self._agent = agent

    def __call__(self, message: Rollout) -> UpdateResult:
        """Learn from one rollout; ticks that only reset an environment are left out."""
        data = rollout_tensors(self._agent, self.online, message, self._device)
        made, losses, norms, values = 0, [], [], []
        for _ in range(self._agent.epochs):
            order = torch.randperm(len(data.action), generator=self._generator, device=self._device)
            for chosen in order.tensor_split(self._agent.minibatches):
                loss, value = self._minibatch_loss(data, chosen)
                stepped, norm = self._step(loss)
                made += stepped
                losses.append(loss.detach())
                norms.append(norm)
                values.append(value)
        total = self._agent.epochs * self._agent.minibatches
        if made:
            self.online.observe(data.observation)
        metrics = {"loss": losses, "grad_norm": norms, "q_mean": values}
        means = {name: torch.stack(items).mean() for name, items in metrics.items()}
        return UpdateResult(made, skipped=total - made, metrics=means)

    def _minibatch_loss(self, data: RolloutTensors, chosen: Tensor) -> tuple[Tensor, Tensor]:
        observation = {name: leaf[chosen] for name, leaf in data.observation.items()}
        value = pick(self.online(observation), data.action[chosen])
        errors = value_error(value, data.goal[chosen], self._agent.loss, self._agent.huber_threshold)
        size = max(len(chosen), 1)  # a rollout may have fewer valid ticks than minibatches
        return errors.sum() / size, value.detach().sum() / size


class TabularUpdate:
    """Q-learning on a table, one transition after the other, in the order of ticks and environments."""

    target = None
    target_flat = None

    def __init__(self, agent: TabularAgent, online: QNetwork) -> None:
        assert isinstance(online.head, TableHead)
        self.online, self.updates = online, 0
        self.flat = FlatParameters(online)
        self._agent = agent
        self._table = online.head.table.detach().numpy()
        self.learning_rate = agent.alpha

    def __call__(self, message: Rollout) -> UpdateResult:
        """Learn from every valid tick of one rollout."""
        finals = final_lookup(message)
        states, error = message.observation[PLAIN], 0.0
        ticks = np.argwhere(message.valid)
        for t, e in ticks.tolist():
            row = finals.get((t, e))
            following = states[t + 1, e] if row is None else message.final_observation[PLAIN][row]
            masks, at = (message.mask, (t + 1, e)) if row is None else (message.final_mask, (row,))
            mask = None if masks is None else masks[at]
            discount = 0.0 if message.terminated[t, e] else self._agent.gamma
            transition = (int(states[t, e]), int(message.action[t, e]), float(message.reward[t, e]), int(following))
            error += abs(q_learning(self._table, transition, discount, self._agent.alpha, mask))
        self.updates += len(ticks)
        return UpdateResult(len(ticks), metrics={"td_error": torch.tensor(error / max(len(ticks), 1))})

    def score(self, value: float) -> None:
        """Do nothing: a table has no learning-rate schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Return the table and the count."""
        return {"weights": self.flat.to_numpy(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.flat.load_numpy(state["weights"])
        self.updates = state["updates"]
