"""One learning step of a recurrent agent: what a learner does with a batch of sequences."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import QNetwork
from qfleet.algo.sequences import TensorSequences, sequence_loss, sequence_tensors
from qfleet.algo.steps import Step
from qfleet.algo.updates import DeepUpdate, Learned, UpdateResult
from qfleet.core.types import SequenceBatch


class SequenceUpdate(DeepUpdate):
    """One gradient step on a batch of replayed sequences, and what it means for the target network."""

    def __init__(self, agent: ReplayAgent, online: QNetwork, step: Step, generator: torch.Generator) -> None:
        super().__init__(online, step, generator)
        self._agent = agent
        self.target = copy.deepcopy(online).explore()
        self.target_flat = FlatParameters(self.target)
        step.watch(self.target_flat, agent.target)

    def __call__(self, message: SequenceBatch) -> UpdateResult:
        """Learn from one batch."""
        learned = self.learn(sequence_tensors(message, self._device))
        if not learned.made:
            return UpdateResult(0, skipped=1, metrics=learned.metrics)
        return UpdateResult(1, priority=learned.priority.cpu().numpy(), metrics=learned.metrics)

    def learn(self, batch: TensorSequences) -> Learned:
        """Learn from one batch that is on the device."""
        if self._agent.noisy:
            self.online.resample_noise(self._generator)
            self.target.resample_noise(self._generator)
        loss = sequence_loss(self._agent, self.online, self.target, batch)
        total = torch.dot(loss.per_sample, batch.weight) / batch.size
        self.flat.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        total = total.detach()
        made, norm = self._step(total)
        priority = loss.priority.where(made, math.nan) if isinstance(made, Tensor) else loss.priority
        if made is not False:
            self.online.observe(batch.observation)
            self._step.follow()
        return Learned(made, priority, {"loss": total, "grad_norm": norm, **loss.metrics})

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the future of this object depends on."""
        return {**super().state_dict(), "target": self.target_flat.to_numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(state)
        self.target_flat.load_numpy(state["target"])
