"""The part of a gradient step that a worker makes: it clips, the servers move the weights, its target follows them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qfleet.accel.precision import LossScale
from qfleet.algo.agent import HardTargetConfig, SoftTargetConfig, TargetConfig
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import QNetwork

_TINY = 1e-6
"""Keeps the clipped norm just below its limit, as torch's own clipping does."""


class RemoteStep:
    """Leaves the clipped gradient in `flat.gradients` to be sent; the weights come back with a later version.

    It has the methods of `algo.steps.Step`.
    """

    def __init__(self, online: QNetwork, limit: float, scale: LossScale | None) -> None:
        """Clip to the norm `limit`; `scale` is what gradients come multiplied by, if anything."""
        self.flat = FlatParameters(online)
        self.count, self.learning_rate = 0, 0.0
        self._limit, self._scale = limit, scale
        self._first_gradient = self.flat.gradients[:1]
        self._target: FlatParameters | None = None
        self._rule: TargetConfig | None = None

    def prepare(self, total_updates: int | None = None) -> None:
        """Do nothing: the servers know the schedule."""

    def __call__(self, loss: Tensor) -> tuple[bool, Tensor]:
        """Clip `flat.gradients`, those of the scalar loss (detached); return whether they are finite, and their norm.

        Waits for the device, as sending the gradient does anyway.
        """
        gradients = self.flat.gradients
        if self._scale is not None:
            gradients.div_(self._scale.value)
        self._first_gradient.add_(loss, alpha=0)  # an infinite loss may have finite gradients (Huber's)
        norm: Tensor = torch.linalg.vector_norm(gradients)
        value = norm.item()
        finite = math.isfinite(value)
        if finite and value > self._limit:
            gradients.mul_(self._limit / (value + _TINY))
        if self._scale is not None:
            self._scale.adapt(finite, loss)
        return finite, norm

    def watch(self, target: FlatParameters, rule: TargetConfig) -> None:
        """Take the network that is to follow, and how."""
        self._target, self._rule = target, rule

    def follow(self) -> None:
        """Do nothing: the target follows when the weights arrive."""

    def arrive(self, version: int, learning_rate: float) -> None:
        """Let the target network follow the weights, which were just replaced by those of a later version.

        A soft target goes as far as it would have gone towards them in as many steps; a hard one is replaced if the
        version has passed a multiple of its period.
        """
        before, self.count, self.learning_rate = self.count, version, learning_rate
        passed = version - before
        if self._target is None or passed <= 0:
            return
        if isinstance(self._rule, SoftTargetConfig):
            tau = self._rule.tau
            self._target.lerp_from(self.flat, tau if passed == 1 else 1 - (1 - tau) ** passed)
        elif isinstance(self._rule, HardTargetConfig) and version // self._rule.period > before // self._rule.period:
            self._target.copy_from(self.flat)

    def score(self, value: float) -> None:
        """Do nothing: the servers hear the scores themselves."""

    def state_dict(self) -> dict[str, Any]:
        """Return weights, version and scale."""
        scale = {} if self._scale is None else {"scaling": self._scale.state_dict()}
        return {"weights": self.flat.to_numpy(), "count": self.count, "learning_rate": self.learning_rate, **scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.flat.load_numpy(state["weights"])
        self.count, self.learning_rate = state["count"], state["learning_rate"]
        if self._scale is not None and "scaling" in state:
            self._scale.load_state_dict(state["scaling"])
