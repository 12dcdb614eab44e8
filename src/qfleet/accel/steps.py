"""Gradient steps on a device: one that never waits for it, and one that takes scaled gradients to any optimiser."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfleet.accel.kernels.launch import available
from qfleet.accel.precision import LossScale
from qfleet.algo.agent import TargetConfig
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import QNetwork
from qfleet.algo.optim import AdamConfig, AdamWConfig, OptimConfig
from qfleet.algo.schedules import LearningRate
from qfleet.algo.steps import GradientHook, GradientStep


def supports(optim: OptimConfig, device: torch.device) -> bool:
    """Return whether `DeviceStep` can make the steps of this optimiser on this device."""
    return isinstance(optim, AdamConfig | AdamWConfig) and device.type == "cuda" and available()


class DeviceStep:
    """Adam or AdamW by our own kernels; does what `algo.steps.GradientStep` does, and can be recorded.

    What is finite, clipped or due is decided on the device. The learning rate is that of the last `prepare`: between
    two of them it stays, whatever its schedule says.
    """

    def __init__(
        self,
        online: QNetwork,
        optim: OptimConfig,
        total_updates: int | None,
        hook: GradientHook | None,
        scale: LossScale | None = None,
    ) -> None:
        """Take the `scale` that gradients come multiplied by, if any."""
        assert isinstance(optim, AdamConfig | AdamWConfig)
        self.flat = FlatParameters(online)
        self._config, self._hook, self._scale = optim, hook, scale
        self._no_loss = torch.zeros((), device=self.flat.parameters.device)
        self._schedule = LearningRate(optim.schedule, total_updates)
        self._target: FlatParameters | None = None
        self._adam = self._build(None)
        self._rate = optim.lr

    def _build(self, rule: TargetConfig | None) -> Any:
        from qfleet.accel.kernels.optim import FlatAdam

        target = None if self._target is None else self._target.parameters
        return FlatAdam(self._config, self.flat.parameters, self.flat.gradients, target, rule, scale=self._scale)

    @property
    def count(self) -> int:
        """Steps made since the start of the run. Waits for the device."""
        return int(self._adam.count.item())

    @property
    def learning_rate(self) -> float:
        """The rate since the last `prepare`."""
        return self._rate

    def prepare(self, total_updates: int | None = None) -> None:
        """Bring the learning rate up to where the run is. Waits for the device, unless the rate is always the same."""
        if total_updates is not None:
            self._schedule.replan(total_updates)
        update = 0 if self._schedule.steady else self.count
        self._rate = self._config.lr * self._schedule.fraction(update)
        self._adam.rate.fill_(self._rate)

    def __call__(self, loss: Tensor) -> tuple[bool | Tensor, Tensor]:
        """Make one step along `flat.gradients` unless they, or the loss, are not finite."""
        if self._hook is not None:
            loss = self._shared(loss)
        self._adam.step(loss)
        return self._adam.made > 0, self._adam.norm

    def _shared(self, loss: Tensor) -> Tensor:
        """Join the gradients of all ranks; return a loss that they all judge alike."""
        assert self._hook is not None
        self.flat.gradients[:1].add_(loss, alpha=0)  # a loss that is not finite spoils a gradient, on every rank
        self._hook(self.flat.gradients)
        return self._no_loss

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
            **_scaling(self._scale),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.flat.load_numpy(state["weights"])
        self._adam.load_state_dict(state["optim"])
        self._adam.refresh()
        self._schedule.load_state_dict(state["optim"]["schedule"])
        _load_scaling(self._scale, state)


class ScaledStep(GradientStep):
    """A step with any optimiser, on any device, along gradients that come multiplied by a loss scale."""

    def __init__(
        self,
        online: QNetwork,
        optim: OptimConfig,
        total_updates: int | None,
        hook: GradientHook | None,
        scale: LossScale,
    ) -> None:
        super().__init__(online, optim, total_updates, hook)
        self._scale, self._shared = scale, hook is not None

    def __call__(self, loss: Tensor) -> tuple[bool, Tensor]:
        """Take the scale out of `flat.gradients`, then make one step along them unless something is not finite."""
        self.flat.gradients.div_(self._scale.value)
        made, norm = super().__call__(loss)
        # With several ranks nobody knows whose loss it was: all of them blame the scale, so that it stays the same.
        self._scale.adapt(made, torch.zeros_like(norm) if self._shared else loss)
        return made, norm

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimiser, count and scale."""
        return {**super().state_dict(), **_scaling(self._scale)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(state)
        _load_scaling(self._scale, state)


def _scaling(scale: LossScale | None) -> dict[str, Any]:
    return {} if scale is None else {"scaling": scale.state_dict()}


def _load_scaling(scale: LossScale | None, state: dict[str, Any]) -> None:
    """Continue with the saved scale; a run that had none begins with a fresh one."""
    if scale is not None and "scaling" in state:
        scale.load_state_dict(state["scaling"])
