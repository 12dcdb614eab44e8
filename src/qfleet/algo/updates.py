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

from qfleet.algo.agent import (
    AgentConfig,
    ReplayAgent,
    RolloutAgent,
    TabularAgent,
)
from qfleet.algo.batch import to_tensors
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import EagerGradient, GradientFactory
from qfleet.algo.heads import TableHead
from qfleet.algo.networks import QNetwork
from qfleet.algo.optim import OptimConfig
from qfleet.algo.rollouts import GathersRows, RolloutTensors, final_lookup, rollout_tensors
from qfleet.algo.steps import GradientHook, GradientStep, Step, StepFactory
from qfleet.algo.tabular import q_learning
from qfleet.core.spec import PLAIN
from qfleet.core.tensors import TensorBatch
from qfleet.core.types import Batch, Floats, Rollout


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


@dataclass(frozen=True)
class Learned:
    """What came of one batch that was on the device already."""

    made: int | Tensor
    """How many gradient steps were made; one is left out if loss or gradient is not finite."""
    priority: Tensor
    """[B] new priorities of the batch's items; of a step that was left out, not finite, or of no meaning if none was
    made and the host knows."""
    metrics: dict[str, Tensor]
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
        """Learn from one Batch (SequenceBatch with memory) of a replay agent, or Rollout of the others."""

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
    gradient: GradientFactory = EagerGradient,
    stepper: StepFactory | None = None,
) -> Update:
    """Return the update that belongs to the agent. Network and generator must already be on the learner's device."""
    if isinstance(agent, TabularAgent):
        return TabularUpdate(agent, online)
    step = (stepper or GradientStep)(online, optim, total_updates, gradient_hook)
    if isinstance(agent, ReplayAgent) and agent.memory is not None:
        from qfleet.algo.sequence_updates import SequenceUpdate  # which builds on this file

        return SequenceUpdate(agent, online, step, generator)
    if isinstance(agent, ReplayAgent):
        return ReplayUpdate(agent, online, step, generator, gradient)
    return RolloutUpdate(agent, online, step, generator, gradient)


class DeepUpdate:
    """What the two updates by gradients share."""

    def __init__(self, online: QNetwork, step: Step, generator: torch.Generator) -> None:
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
        return self._step.learning_rate

    def prepare(self, total_updates: int | None = None) -> None:
        """Bring up to date what stays the same during a piece of work; the run's length too, if it is known better."""
        self._step.prepare(total_updates)

    def score(self, value: float) -> None:
        """Tell the learning rate the mean return of one evaluation."""
        self._step.score(value)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the future of this object depends on."""
        return {"step": self._step.state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._step.load_state_dict(state["step"])
        self._generator.set_state(state["generator"])


class ReplayUpdate(DeepUpdate):
    """One gradient step on a batch of replayed transitions, and what it means for the target network."""

    def __init__(
        self,
        agent: ReplayAgent,
        online: QNetwork,
        step: Step,
        generator: torch.Generator,
        gradient: GradientFactory,
    ) -> None:
        super().__init__(online, step, generator)
        self._agent = agent
        self.target = copy.deepcopy(online).explore()
        self.target_flat = FlatParameters(self.target)
        step.watch(self.target_flat, agent.target)
        self._gradient = gradient(agent, self.flat, online, self.target)
        self.seen: Callable[[TensorBatch], TensorBatch] | None = None
        """Puts observations in the place of the rows that batches have instead; None for batches that have them."""

    def __call__(self, message: Batch) -> UpdateResult:
        """Learn from one batch."""
        learned = self.learn(to_tensors(message, self._device))
        made = int(learned.made)
        priority = learned.priority.cpu().numpy() if made else None
        return UpdateResult(made, skipped=message.updates - made, priority=priority, metrics=learned.metrics)

    def learn(self, batch: TensorBatch) -> Learned:
        """Learn from one batch that is on the device, in as many updates as it is for."""
        if batch.updates > 1:
            return _in_turn([self._learn_once(part) for part in batch.split(batch.updates)])
        return self._learn_once(batch)

    def _learn_once(self, batch: TensorBatch) -> Learned:
        if self.seen is not None:
            batch = self.seen(batch)
        if self._agent.noisy:
            self.online.resample_noise(self._generator)
            self.target.resample_noise(self._generator)
        found = self._gradient.replay(batch)
        made, norm = self._step(found.total)
        priority = found.priority
        if isinstance(made, Tensor):
            priority = priority.where(made, math.nan)
        if made is not False:
            self.online.observe(batch.observation)
            self._step.follow()
        return Learned(made, priority, {"loss": found.total, "grad_norm": norm, **found.metrics})

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the future of this object depends on."""
        return {**super().state_dict(), "target": self.target_flat.to_numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(state)
        self.target_flat.load_numpy(state["target"])


def _in_turn(learned: list[Learned]) -> Learned:
    """Return what came of several updates as one: all priorities, and the numbers of the last."""
    if isinstance(learned[0].made, Tensor):
        made: int | Tensor = torch.stack([torch.as_tensor(one.made) for one in learned]).sum()
        priority = [one.priority for one in learned]
    else:
        made = sum(int(one.made) for one in learned)
        priority = [one.priority if one.made else one.priority * math.nan for one in learned]
    return Learned(made, torch.cat(priority), learned[-1].metrics)


class RolloutUpdate(DeepUpdate):
    """Epochs of gradient steps on the minibatches of one rollout (PQN).

    A step's gradient is the mean over a minibatch. Ranks that share one have parts of that, which a hook sums as they
    are: whoever computes a part divides by the samples of all (`roles.fused.shares`).
    """

    target = None
    target_flat = None

    def __init__(
        self,
        agent: RolloutAgent,
        online: QNetwork,
        step: Step,
        generator: torch.Generator,
        gradient: GradientFactory,
    ) -> None:
        super().__init__(online, step, generator)
        self._agent = agent
        self._gradient = gradient(agent, self.flat, online, None)
        self._minibatch = self._gradient.regression_of if isinstance(self._gradient, GathersRows) else self._of_copies
        self._empty = torch.zeros((), dtype=torch.int64, device=self._device)

    def __call__(self, message: Rollout) -> UpdateResult:
        """Learn from one rollout; ticks that only reset an environment are left out."""
        return self.learn(rollout_tensors(self._agent, self.online, message, self._device))

    def learn(self, data: RolloutTensors) -> UpdateResult:
        """Learn from the samples of one rollout that are on the device; a minibatch without any weight is left out."""
        samples, batches = len(data.action), min(self._agent.minibatches, len(data.action))
        if not samples:
            return UpdateResult(0)
        weight = data.weight if self._may_lack_weight(samples) else None
        made, losses, norms, values = 0, [], [], []
        for _ in range(self._agent.epochs):
            order = torch.randperm(samples, generator=self._generator, device=self._device)
            for chosen in order.tensor_split(batches):
                loss, value = self._minibatch(data, chosen)
                if weight is not None:
                    loss, value = self._of_any(weight[chosen], loss, value)
                stepped, norm = self._step(loss)
                made += stepped is not False
                losses.append(loss)
                norms.append(norm)
                values.append(value)
        if made:
            self.online.observe(data.observation)
        metrics = {"loss": losses, "grad_norm": norms, "q_mean": values}
        mean = torch.mean if weight is None else torch.nanmean
        means = {name: mean(torch.stack(items)) for name, items in metrics.items()}
        return UpdateResult(made, skipped=self._agent.epochs * batches - made, metrics=means)

    def take_empty(self) -> int:
        """Return how many minibatches since the last call were left out for lack of weight. Waits for the device."""
        count = int(self._empty.item())
        self._empty.zero_()
        return count

    def _may_lack_weight(self, samples: int) -> bool:
        """Return whether a minibatch of only resets can turn up in anyone's lifetime."""
        ticks = self._agent.rollout_length
        resets = math.ceil(ticks / 2) / ticks  # between two resets an environment makes a step
        return bool(resets ** (samples // self._agent.minibatches) > 2**-64)

    def _of_any(self, weight: Tensor, loss: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean loss and value as they are, or as no numbers without any weight: then no step is made.

        A step along a gradient of 0 would still move the weights, by momentum.
        """
        empty = weight.sum() == 0
        self._empty.add_(empty)
        return loss.masked_fill(empty, math.nan), value.masked_fill(empty, math.nan)

    def _of_copies(self, data: RolloutTensors, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient of the samples with the numbers `chosen`; return their mean error and mean value."""
        return self._gradient.regression(
            {name: leaf.index_select(0, chosen) for name, leaf in data.observation.items()},
            data.action.index_select(0, chosen),
            data.goal.index_select(0, chosen),
            None if data.weight is None else data.weight.index_select(0, chosen),
        )


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
