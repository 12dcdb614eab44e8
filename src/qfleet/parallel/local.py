"""Fewer synchronisations: each rank makes steps of its own, and now and then all of them agree on where to go on."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from qfleet.algo.networks import QNetwork
from qfleet.algo.optim import OptimConfig
from qfleet.algo.steps import GradientHook, GradientStep
from qfleet.core.config import Config


class LocalConfig(Config):
    """Local updates: ranks learn apart, and average the ways that they went."""

    kind: Literal["local"] = "local"
    period: int = Field(16, gt=0)
    """Updates of each rank between two meetings."""
    outer_lr: float = Field(0.7, gt=0)
    """How far all go along the mean of the ways; 1 without momentum is plain averaging."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov momentum of the meetings (DiLoCo)."""


class LocalStep(GradientStep):
    """A rank's own step; every `period`-th is followed by a meeting, from which all ranks go on with the same weights.

    A step that is not finite is left out on its rank alone. Meetings are counted by steps tried: those are as many on
    every rank.
    """

    def __init__(
        self,
        online: QNetwork,
        optim: OptimConfig,
        total_updates: int | None,
        hook: GradientHook | None,
        *,
        config: LocalConfig,
        ranks: int,
    ) -> None:
        """Take the hook that sums a vector [P] over all ranks: here it sums ways, not gradients."""
        assert hook is not None
        super().__init__(online, optim, total_updates, None)
        self._config, self._ranks, self._sum = config, ranks, hook
        self._tried = 0
        self._anchor = self.flat.parameters.clone()
        """[P] where all ranks were after the last meeting."""
        self._momentum = torch.zeros_like(self._anchor)

    def __call__(self, loss: Tensor) -> tuple[bool, Tensor]:
        """Make one step along `flat.gradients`; meet the others if it is time."""
        # The loss is a share of the whole batch's; here it is a batch of its own. Parts may differ by a sample: a rank
        # that has more goes further, so that in the mean of the ways every sample counts alike.
        self.flat.gradients.mul_(self._ranks)
        made, norm = super().__call__(loss)
        self._tried += 1
        if self._tried % self._config.period == 0:
            self._meet()
        return made, norm

    def _meet(self) -> None:
        """Go from the last common weights along the mean of all ways, with momentum."""
        way = self._anchor - self.flat.parameters
        self._sum(way)
        way.div_(self._ranks)
        config = self._config
        self._momentum.mul_(config.outer_momentum).add_(way)
        self._anchor.sub_(way.add_(self._momentum, alpha=config.outer_momentum), alpha=config.outer_lr)
        self.flat.parameters.copy_(self._anchor)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimiser, count, and where the ranks last met."""
        meeting = {"tried": self._tried, "anchor": self._anchor.cpu(), "momentum": self._momentum.cpu()}
        return {**super().state_dict(), "meeting": meeting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; ranks that were one before have just met."""
        super().load_state_dict(state)
        nowhere = {"tried": 0, "anchor": self.flat.parameters, "momentum": torch.zeros_like(self._momentum)}
        meeting = state.get("meeting", nowhere)
        self._tried = meeting["tried"]
        self._anchor.copy_(torch.as_tensor(meeting["anchor"]))
        self._momentum.copy_(torch.as_tensor(meeting["momentum"]))
