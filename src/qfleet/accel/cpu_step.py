"""Adam's step on a CPU in one pass of compiled loops: norm, finite gate, clipping, averages, parameters, target."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qfleet.accel.compiled import FLOATS, compiled, part
from qfleet.algo.agent import HardTargetConfig, SoftTargetConfig, TargetConfig
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import QNetwork
from qfleet.algo.optim import AdamConfig, AdamWConfig, OptimConfig
from qfleet.algo.schedules import LearningRate
from qfleet.algo.steps import GradientHook
from qfleet.core.errors import CheckpointError
from qfleet.core.types import Floats

_BLOCK = 2048
"""Parameters that are worked on at a time: few enough to stay in the first cache between two loops over them."""
_TINY = 1e-6
"""Keeps the clipped norm just below its limit, as torch's own clipping does."""


def supports(optim: OptimConfig) -> bool:
    """Return whether `CompiledStep` can make the steps of this optimiser."""
    return isinstance(optim, AdamConfig | AdamWConfig) and optim.l1 == 0


@part
def _norm(gradients: Floats) -> float:
    """Return the root of the sum of the squares of gradients [P]."""
    total = 0.0
    for i in range(len(gradients)):
        total += float(gradients[i]) * float(gradients[i])
    return math.sqrt(total)


@part
def _move(
    arrays: tuple[Floats, Floats, Floats, Floats], target: Floats, numbers: tuple[Any, ...], span: tuple[int, int]
) -> None:
    """Move those of the parameters, averages and target, each [P], that lie in a span; see `_step` for the numbers."""
    clip, decay, keep, beta1, gain1, beta2, gain2, rate, eps, tau = numbers
    start, end = span
    value, slope, mean, square = arrays[0][start:end], arrays[1][start:end], arrays[2][start:end], arrays[3][start:end]
    for i in range(len(value)):
        along = slope[i] * clip + value[i] * decay
        mean[i] = mean[i] * beta1 + along * gain1
        square[i] = square[i] * beta2 + along * along * gain2
    for i in range(len(value)):
        value[i] = value[i] * keep - rate * mean[i] / (np.sqrt(square[i]) + eps)
    if len(target) > 0:
        follower = target[start:end]
        for i in range(len(value)):
            follower[i] += tau * (value[i] - follower[i])


@compiled(f"UniTuple({FLOATS},4)", FLOATS, "UniTuple(float64,7)", "float64", "int64", result="float64")
def _step(
    arrays: tuple[Floats, Floats, Floats, Floats],
    target: Floats,
    settings: tuple[float, ...],
    rate: float,
    number: int,
) -> float:
    """Make step `number`, from 1, on parameters, gradients and two averages, each [P]; return the gradients' norm.

    A target that is not empty follows. If the norm is not finite nothing changes. The settings are: the betas, eps,
    the decay that is added to gradients, the one that is not, the largest norm, and how far the target follows.
    """
    beta1, beta2, eps, coupled, decoupled, limit, tau = settings
    norm = _norm(arrays[1])
    if not math.isfinite(norm):
        return norm
    clip = limit / (norm + _TINY) if norm > limit else 1.0
    later = math.sqrt(1 - beta2**number)  # corrects averages that began at 0
    numbers = (
        np.float32(clip), np.float32(coupled), np.float32(1 - rate * decoupled),
        np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2),
        np.float32(rate * later / (1 - beta1**number)), np.float32(eps * later), np.float32(tau),
    )  # fmt: skip
    for start in range(0, len(arrays[0]), _BLOCK):
        _move(arrays, target, numbers, (start, min(start + _BLOCK, len(arrays[0]))))
    return norm


class CompiledStep:
    """Adam or AdamW; does what `algo.steps.GradientStep` does, and their saved states are interchangeable."""

    def __init__(
        self, online: QNetwork, optim: OptimConfig, total_updates: int | None, hook: GradientHook | None
    ) -> None:
        assert isinstance(optim, AdamConfig | AdamWConfig)
        self.flat, self.count = FlatParameters(online), 0
        self._config, self._hook, self._update = optim, hook, 0
        self._schedule = LearningRate(optim.schedule, total_updates)
        parameters, gradients = self.flat.parameters.numpy(), self.flat.gradients.numpy()
        self._arrays = parameters, gradients, np.zeros_like(parameters), np.zeros_like(parameters)
        self._target: FlatParameters | None = None
        self._rule: TargetConfig | None = None
        self._follower = np.zeros(0, np.float32)
        self._settings = self._settle(0.0)

    def _settle(self, tau: float) -> tuple[float, ...]:
        """Return what stays the same for all steps."""
        config = self._config
        decays = (0.0, config.weight_decay) if isinstance(config, AdamWConfig) else (config.weight_decay, 0.0)
        limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
        return (*config.betas, config.eps, *decays, limit, tau)

    @property
    def learning_rate(self) -> float:
        """How large the next step is."""
        return self._config.lr * self._schedule.fraction(self._update)

    def prepare(self, total_updates: int | None = None) -> None:
        """Take the run's length, if it is known better; every step looks at its schedule."""
        if total_updates is not None:
            self._schedule.replan(total_updates)

    def __call__(self, loss: Tensor) -> tuple[bool, Tensor]:
        """Make one step along `flat.gradients`, those of the scalar loss (detached), unless one is not finite.

        Return whether it was made, and the gradient's norm before clipping.
        """
        # An infinite loss may have finite gradients (Huber's): it must spoil one here, so that every rank skips.
        self._arrays[1][0] += loss.item() * 0.0
        if self._hook is not None:
            self._hook(self.flat.gradients)
        self._update = self.count
        norm = _step(self._arrays, self._follower, self._settings, self.learning_rate, self.count + 1)
        made = math.isfinite(norm)
        self.count += made
        return made, torch.tensor(norm)

    def watch(self, target: FlatParameters, rule: TargetConfig) -> None:
        """Take the network that is to follow, and how; one that follows softly moves with each step."""
        self._target, self._rule = target, rule
        if isinstance(rule, SoftTargetConfig):
            self._follower, self._settings = target.parameters.numpy(), self._settle(rule.tau)

    def follow(self) -> None:
        """Let the target network follow the step just made, as far as it did not move with it."""
        assert self._target is not None
        if isinstance(self._rule, HardTargetConfig):
            if self.count % self._rule.period == 0:
                self._target.copy_from(self.flat)
        elif self._target.buffers.numel():
            self._target.buffers.copy_(self.flat.buffers)

    def score(self, value: float) -> None:
        """Tell the learning rate the mean return of one evaluation."""
        self._schedule.score(value)

    def _averages(self) -> dict[str, Floats]:
        """Return the averages by torch's names."""
        return {"exp_avg": self._arrays[2], "exp_avg_sq": self._arrays[3]}

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimiser and count."""
        moments = {name: torch.from_numpy(value.copy()) for name, value in self._averages().items()}
        moments["step"] = torch.tensor(float(self.count))
        optim = {"kind": self._config.kind, "update": self._update, "schedule": self._schedule.state_dict()}
        return {"weights": self.flat.to_numpy(), "optim": {**optim, "moments": moments}, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        optim, moments, averages = state["optim"], state["optim"]["moments"], self._averages()
        sizes = {len(moments[name]) for name in averages if moments}
        if optim["kind"] != self._config.kind or not sizes <= {len(self._arrays[0])}:
            raise CheckpointError(
                f"a saved {optim['kind']} state does not fit the optimiser {self._config.kind} of size"
                f" {len(self._arrays[0])}: resume with the settings of the saved run"
            )
        self.flat.load_numpy(state["weights"])
        for name, average in averages.items():
            average[:] = moments[name].numpy() if moments else 0  # another kind of step saves none before its first
        self._update, self.count = optim["update"], state["count"]
        self._schedule.load_state_dict(optim["schedule"])
