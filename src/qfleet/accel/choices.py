"""Which implementation makes gradients, steps and acting values, by device, network and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qfleet.accel import steps
from qfleet.accel.choose import Choice, Workload, resolve
from qfleet.accel.config import AccelConfig
from qfleet.accel.convolutions import compute_by_products
from qfleet.accel.gradients import WrappedGradient, can_compile
from qfleet.accel.hardware import Hardware, look, why_no_cuda
from qfleet.accel.mlp import MlpForward, MlpGradient, compiles_loops, why_not_compiled
from qfleet.accel.mlp import supports as is_small_mlp
from qfleet.accel.onednn import compute_by_onednn
from qfleet.accel.precision import ROUNDED, LossScale, Precision, autocast, set_deterministic, set_matrix_format
from qfleet.accel.table import Settings
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import DeepAgent, EagerGradient, Gradient, GradientFactory
from qfleet.algo.networks import QNetwork
from qfleet.algo.optim import OptimConfig
from qfleet.algo.steps import GradientStep, StepFactory

CHANGED = "computed in another way than before it was cut (accel, or numba): it goes on, but not to the byte"
"""What to tell a person whose run is computed in another way than before."""
_BEFORE = {"onednn": False}
"""What was so in runs whose fingerprint does not say it."""


@dataclass(frozen=True)
class Job:
    """What is to be computed where, and what its user wants of it."""

    accel: AccelConfig
    agent: DeepAgent
    optim: OptimConfig
    device: torch.device
    workload: Workload
    barred: Mapping[str, str] = field(default_factory=dict)
    """Settings that whoever computes it cannot use, with the reason."""
    former: Settings | None = None
    """What a run that goes on was computed with before."""


@dataclass(frozen=True)
class Choices:
    """How this run is computed; what it computes is the same for all choices."""

    settings: Settings
    gradient: GradientFactory
    stepper: StepFactory
    small: bool
    """Whether the network is one of the hand-written small ones."""
    description: str
    """The choices and why, in one line, for a person."""
    scale: LossScale | None = None
    """What losses are multiplied by, in float16."""
    small_cnn: bool = False
    """Whether the network is the small convolutional one that has kernels of its own on a GPU."""
    loops: bool = False
    """Whether numba compiled the loops of a small network."""
    onednn: bool = False
    """Whether oneDNN computes the products of large dense layers."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the last bits of the run's numbers depend on, as it is saved."""
        return {**self.settings.model_dump(), "loops": self.loops, "onednn": self.onednn}

    def differ_from(self, saved: Mapping[str, Any]) -> bool:
        """Return whether a run that was saved with this fingerprint, if any, had other last bits."""
        return bool(saved) and {**self.fingerprint, **_BEFORE, **saved} != self.fingerprint

    @property
    def recorded(self) -> bool:
        """Whether pieces of the loop are recorded as CUDA graphs."""
        return self.settings.graphs

    def forgiven(self) -> int:
        """Return how many skipped updates since the last call are the loss scale's fault. Waits for the device."""
        return 0 if self.scale is None else self.scale.take_overflows()

    def values(self, network: QNetwork) -> Callable[[dict[str, Tensor]], Tensor]:
        """Return what values the actions for acting; make it after the network's `FlatParameters`."""
        if self.small:
            return MlpForward(network).q
        if self.small_cnn:
            return _small_cnn_values(network, self.settings)
        if self.settings.precision not in ROUNDED:
            return network.q

        def rounded(observation: dict[str, Tensor]) -> Tensor:
            with autocast(self.settings.precision, next(iter(observation.values())).device):
                return network.q(observation)

        return rounded


def choose(job: Job, network: QNetwork) -> Choices:
    """Return how to compute the updates of a network on its device; sets the process's format of float32 products.

    Keeping channels last is a change of the network, which must not have been copied for a target yet.
    """
    hardware = look(job.device)
    obstacles = {**_obstacles(job, network), **job.barred}
    choice = resolve(job.accel, hardware, job.workload, obstacles, job.former)
    settings = choice.settings
    small = hardware.kind == "cpu" and settings.kernels
    scale = LossScale(next(network.parameters()).device) if settings.precision == "fp16" else None
    if hardware.kind != "cpu":
        set_matrix_format(settings.precision)
    if hardware.kind == "cuda" or not job.accel.deterministic:
        set_deterministic(job.accel.deterministic)
    if settings.channels_last:
        keep_channels_last(network)
    elif settings.compile and hardware.kind == "cuda":
        compute_by_products(network)
    onednn = hardware.kind == "cpu" and not small and compute_by_onednn(network, job.accel, job.workload.foreign)
    small_cnn = hardware.kind == "cuda" and settings.kernels and scale is None and _is_small_cnn(network, job)
    gradient: GradientFactory
    if small:
        gradient = MlpGradient
    elif small_cnn:
        gradient = partial(_small_cnn_gradient, settings=settings)
    else:
        gradient = _gradient(job.agent, hardware, settings, network, scale)
    stepper, loops = _stepper(settings, job.optim, small, scale), small and compiles_loops()
    line = _line(choice, hardware, small, onednn)
    return Choices(settings, gradient, stepper, small, line, scale, small_cnn, loops, onednn)


def _line(choice: Choice, hardware: Hardware, small: bool, onednn: bool) -> str:
    """Return the choice for a person, with what else decides the speed of a run on a CPU."""
    parts = [choice.line(hardware)]
    if onednn and choice.settings.precision == "fp32":
        parts.append("large dense layers by oneDNN")
    if small:
        problem = why_not_compiled()
        parts.append(f"loops not compiled: {problem}" if problem else "loops compiled by numba")
        if not problem and (lost := _why_not_kept()):
            parts.append(f"compiled anew in every process: {lost}")
    if hardware.kind == "cpu" and (reason := why_no_cuda()):
        parts.append(f"no CUDA: {reason}")
    return "; ".join(parts)


def _gradient(
    agent: DeepAgent, hardware: Hardware, settings: Settings, network: QNetwork, scale: LossScale | None
) -> GradientFactory:
    """Return what makes gradients of a network that is none of the small ones."""
    ours = hardware.kind == "cuda" and settings.kernels
    if ours and settings.precision in ("bf16", "tf32") and _is_nature(network, agent):
        return partial(_nature_gradient, precision=settings.precision)
    if ours and not settings.compile and _is_kernel_loss(network, agent):
        return partial(_loss_kernel_gradient, settings=settings, scale=scale)
    if settings.compile or settings.precision != "fp32":
        return partial(WrappedGradient, precision=settings.precision, compiled=settings.compile, scale=scale)
    return EagerGradient


def _stepper(settings: Settings, optim: OptimConfig, small: bool, scale: LossScale | None) -> StepFactory:
    if small and compiles_loops():
        from qfleet.accel import cpu_step

        return cpu_step.CompiledStep if cpu_step.supports(optim) else GradientStep
    if settings.kernels and not small:
        return partial(steps.DeviceStep, scale=scale)
    return GradientStep if scale is None else partial(steps.ScaledStep, scale=scale)


# Triton and numba are optional, and loading them costs time: what uses them is imported where it is chosen.


def _why_not_kept() -> str:
    from qfleet.core.compiling import why_not_kept

    return why_not_kept()


def _is_nature(network: QNetwork, agent: DeepAgent) -> bool:
    from qfleet.accel.nature import supports

    return supports(network, agent)


def _nature_gradient(
    agent: DeepAgent, flat: FlatParameters, online: QNetwork, target: QNetwork | None, precision: Precision
) -> Gradient:
    from qfleet.accel.nature import NatureGradient

    return NatureGradient(agent, flat, online, target, precision)


def _is_small_cnn(network: QNetwork, job: Job) -> bool:
    from qfleet.accel.small_cnn import supports

    return supports(network, job.agent, job.device)


def _small_cnn_gradient(
    agent: DeepAgent, flat: FlatParameters, online: QNetwork, target: QNetwork | None, settings: Settings
) -> Gradient:
    from qfleet.accel.small_cnn import SmallCnnGradient

    return SmallCnnGradient(agent, flat, online, target, settings.precision)


def _small_cnn_values(network: QNetwork, settings: Settings) -> Callable[[dict[str, Tensor]], Tensor]:
    from qfleet.accel.small_cnn import SmallCnnForward

    return SmallCnnForward(network, settings.precision).q


def _is_kernel_loss(network: QNetwork, agent: DeepAgent) -> bool:
    from qfleet.accel.loss_gradients import supports

    return supports(network, agent)


def _loss_kernel_gradient(
    agent: DeepAgent,
    flat: FlatParameters,
    online: QNetwork,
    target: QNetwork | None,
    settings: Settings,
    scale: LossScale | None,
) -> Gradient:
    from qfleet.accel.loss_gradients import LossKernelGradient

    return LossKernelGradient(agent, flat, online, target, precision=settings.precision, scale=scale)


def keep_channels_last(network: nn.Module) -> None:
    """Let each convolution get its images with their channels last in memory; the ones after the first have it so."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(_channels_last)


def _channels_last(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0].contiguous(memory_format=torch.channels_last)


def _obstacles(job: Job, network: QNetwork) -> dict[str, str]:
    """Return the settings that this network, its optimiser or the wish for equal bits excludes, with the reason."""
    obstacles = {}
    if not can_compile(network, job.agent):
        obstacles["compile"] = "this loss draws random numbers"
    elif job.accel.deterministic and job.device.type != "cpu":
        obstacles["compile"] = "accel.deterministic is set, and compilers may choose anew in every process"
    if job.device.type == "cpu":
        if not is_small_mlp(network, job.agent):
            obstacles["kernels"] = "none for this network on a CPU"
    elif not steps.supports(job.optim, job.device):
        obstacles["kernels"] = f"none for optim.kind '{job.optim.kind}'"
    if not any(isinstance(module, nn.Conv2d) for module in network.modules()):
        obstacles["channels_last"] = "there are no convolutions"
    return obstacles
