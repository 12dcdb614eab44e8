"""Gradient steps that never wait for the device: what is finite, clipped, or due is decided there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfleet.accel.kernels.launch import available
from qfleet.algo.agent import TargetConfig
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import QNetwork
from qfleet.algo.optim import AdamConfig, AdamWConfig, OptimConfig
from qfleet.algo.schedules import LearningRate
from qfleet.algo.steps import GradientHook


def supports(optim: OptimConfig, device: torch.device) -> bool:
    """Return whether `DeviceStep` can make the steps of this optimiser on this device."""
    return isinstance(optim, AdamConfig | AdamWConfig) and device.type == "cuda" and available()


class DeviceStep:
    """Adam or AdamW by our own kernels; does what `algo.steps.GradientStep` does, and can be recorded.

    The learning rate is that of the last `prepare`: between two of them it stays, whatever its schedule says.
    """

    def __init__(
        self, online: QNetwork, optim: OptimConfig, total_updates: int | None, hook: GradientHook | None
    ) -> None:
        assert isinstance(optim, AdamConfig | AdamWConfig)
        self.flat = FlatParameters(online)
        self._config, self._hook = optim, hook
        self._schedule = LearningRate(optim.schedule, total_updates)
        self._target: FlatParameters | None = None
        self._adam = self._build(None)
        self._rate = optim.lr

    def _build(self, rule: TargetConfig | None) -> Any:
        from qfleet.accel.kernels.optim import FlatAdam

        target = None if self._target is None else self._target.parameters
        return FlatAdam(self._config, self.flat.parameters, self.flat.gradients, target, rule)

    @property
    def count(self) -> int:
        """Steps made since the start of the run. Waits for the device."""
        return int(self._adam.count.item())

    @property
    def learning_rate(self) -> float:
        """The rate since the last `prepare`."""
        return self._rate

    def prepare(self, total_updates: int | None = None) -> None:
        """Bring the learning rate up to where the run is. Waits for the device."""
        if total_updates is not None:
            self._schedule.replan(total_updates)
        self._rate = self._config.lr * self._schedule.fraction(self.count)
        self._adam.rate.fill_(self._rate)

    def __call__(self, loss: Tensor) -> tuple[bool | Tensor, Tensor]:
        """Make one step along `flat.gradients` unless they, or the loss, are not finite."""
        if self._hook is not None:
            self._hook(self.flat.gradients)
        self._adam.step(loss)
        return self._adam.made > 0, self._adam.norm

    def watch(self, target: FlatParameters, rule: TargetConfig) -> None:
        """Take the network that is to follow, and how; its parameters move with each step."""
        self._target = target
        self._adam = self._build(rule)

    def follow(self) -> None:
        """Let the target's buffers follow too, as far as the step just made moved its parameters."""
        if self._target is not None and self._target.buffers.numel():
            whole = self._adam.pull > 0
            self._target.buffers.copy_(torch.where(whole, self.flat.buffers, self._target.buffers))

    def score(self, value: float) -> None:
        """Tell the learning rate the mean return of one evaluation."""
        self._schedule.score(value)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimiser and count."""
        optim = self._adam.state_dict()
        moments = {name: value.cpu() for name, value in optim["moments"].items()}
        moments["step"] = moments["step"].float()  # as torch's own optimisers have it
        optim = {**optim, "moments": moments, "update": self.count}
        return {
            "weights": self.flat.to_numpy(),
            "optim": {**optim, "skipped": optim["skipped"].cpu(), "schedule": self._schedule.state_dict()},
            "count": self.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.flat.load_numpy(state["weights"])
        self._adam.load_state_dict(state["optim"])
        self._adam.refresh()
        self._schedule.load_state_dict(state["optim"]["schedule"])
