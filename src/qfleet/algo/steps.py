"""Applies a network's gradient: clipping, optimiser, what is not finite, and the target network that follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from qfleet.algo.agent import HardTargetConfig, SoftTargetConfig, TargetConfig
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import QNetwork
from qfleet.algo.optim import Optim, OptimConfig

GradientHook = Callable[[Tensor], object]
"""Changes the flat gradient [P] in place between backward and step: a sum over all learner ranks, say."""


class Step(Protocol):
    """Applies the flat gradient of one network, and lets its target network follow."""

    flat: FlatParameters

    @property
    def count(self) -> int:
        """Steps made since the start of the run."""

    @property
    def learning_rate(self) -> float:
        """How large the next step is."""

    def prepare(self, total_updates: int | None = None) -> None:
        """Bring up to date what stays the same during a piece of work; the run's length too, if it is known better."""

    def __call__(self, loss: Tensor) -> tuple[bool | Tensor, Tensor]:
        """Make one step along `flat.gradients`, those of the scalar loss (detached).

        Return whether it was made, a scalar tensor if only the device knows, and the gradient's norm before clipping.
        """

    def watch(self, target: FlatParameters, rule: TargetConfig) -> None:
        """Take the network that is to follow, and how."""

    def follow(self) -> None:
        """Let the target network follow the step just made."""

    def score(self, value: float) -> None:
        """Tell the learning rate the mean return of one evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimiser and count."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""


StepFactory = Callable[[QNetwork, OptimConfig, int | None, GradientHook | None], Step]


class GradientStep:
    """Hook, clipping and optimiser for one network's gradient; leaves all as it was if anything is not finite."""

    def __init__(
        self, online: QNetwork, optim: OptimConfig, total_updates: int | None, hook: GradientHook | None
    ) -> None:
        self.flat = FlatParameters(online)
        self.optim = Optim(optim, self.flat, total_updates)
        self.count = 0
        self._hook = hook
        self._first_gradient = self.flat.gradients[:1]
        self._target: FlatParameters | None = None
        self._rule: TargetConfig | None = None

    @property
    def learning_rate(self) -> float:
        """How large the next step is."""
        return self.optim.learning_rate

    def prepare(self, total_updates: int | None = None) -> None:
        """Take the run's length, if it is known better; every step looks at its schedule."""
        if total_updates is not None:
            self.optim.replan(total_updates)

    def __call__(self, loss: Tensor) -> tuple[bool, Tensor]:
        """Make one step along `flat.gradients`, those of the scalar loss (detached).

        Return whether it was made, and the gradient's norm before clipping.
        """
        # An infinite loss may have finite gradients (Huber's): it must spoil one here, so that every rank skips.
        self._first_gradient.add_(loss, alpha=0)
        if self._hook is not None:
            self._hook(self.flat.gradients)
        norm = self.optim.step(self.count)
        made = math.isfinite(norm.item())  # waits for the device; so does reading the priorities
        self.count += made
        return made, norm

    def watch(self, target: FlatParameters, rule: TargetConfig) -> None:
        """Take the network that is to follow, and how."""
        self._target, self._rule = target, rule

    def follow(self) -> None:
        """Let the target network follow the step just made."""
        assert self._target is not None
        if isinstance(self._rule, SoftTargetConfig):
            self._target.lerp_from(self.flat, self._rule.tau)
        elif isinstance(self._rule, HardTargetConfig) and self.count % self._rule.period == 0:
            self._target.copy_from(self.flat)

    def score(self, value: float) -> None:
        """Tell the learning rate the mean return of one evaluation."""
        self.optim.score(value)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimiser and count."""
        return {"weights": self.flat.to_numpy(), "optim": self.optim.state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.flat.load_numpy(state["weights"])
        self.optim.load_state_dict(state["optim"])
        self.count = state["count"]
