"""Which implementation makes gradients, steps and acting values, by device, network and settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from qfleet.accel import steps
from qfleet.accel.choose import Workload, resolve
from qfleet.accel.convolutions import compute_by_products
from qfleet.accel.gradients import WrappedGradient, can_compile
from qfleet.accel.hardware import look, why_no_cuda
from qfleet.accel.mlp import MlpForward, MlpGradient
from qfleet.accel.mlp import supports as is_small_mlp
from qfleet.accel.precision import autocast, set_matrix_format
from qfleet.accel.table import Settings
from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import DeepAgent, EagerGradient, Gradient, GradientFactory
from qfleet.algo.networks import QNetwork
from qfleet.algo.steps import GradientStep, StepFactory
from qfleet.roles.fused.player import Values
from qfleet.roles.fused.setup import FusedSetup

_SAME_WORK = {"gamma", "q_lambda", "huber_threshold", "target"}
"""Settings of agents that change what is learned and not how long it takes."""


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

    @property
    def recorded(self) -> bool:
        """Whether pieces of the loop are recorded as CUDA graphs."""
        return self.settings.graphs

    def values(self, network: QNetwork) -> Values:
        """Return what values the actions for acting; make it after the network's `FlatParameters`."""
        if self.small:
            return MlpForward(network).q
        if self.settings.precision != "bf16":
            return network.q

        def rounded(observation: dict[str, Tensor]) -> Tensor:
            with autocast(self.settings.precision, next(iter(observation.values())).device):
                return network.q(observation)

        return rounded


def choose(setup: FusedSetup, network: QNetwork) -> Choices:
    """Return how to compute the updates of this run; sets the process's format of float32 products.

    Keeping channels last is a change of the network, which must not have been copied for a target yet.
    """
    hardware = look(torch.device(setup.device))
    choice = resolve(setup.accel, hardware, workload_of(setup), _obstacles(setup, network))
    settings = choice.settings
    small = hardware.kind == "cpu" and settings.kernels
    gradient: GradientFactory
    if small:
        gradient = MlpGradient
    elif hardware.kind == "cuda" and settings.kernels and settings.precision == "bf16" and _is_nature(setup, network):
        gradient = _nature_gradient
    elif settings.compile or settings.precision != "fp32":
        gradient = partial(WrappedGradient, precision=settings.precision, compiled=settings.compile)
    else:
        gradient = EagerGradient
    if hardware.kind != "cpu":
        set_matrix_format(settings.precision)
    if settings.channels_last:
        keep_channels_last(network)
    elif settings.compile and hardware.kind == "cuda":
        compute_by_products(network)
    stepper: StepFactory = steps.DeviceStep if settings.kernels and not small else GradientStep
    line = choice.line(hardware)
    if hardware.kind == "cpu" and (reason := why_no_cuda()):
        line = f"{line}; no CUDA: {reason}"
    return Choices(settings, gradient, stepper, small, line)


def _is_nature(setup: FusedSetup, network: QNetwork) -> bool:
    from qfleet.accel.nature import supports

    assert isinstance(setup.agent, ReplayAgent | RolloutAgent)
    return supports(network, setup.agent)


def _nature_gradient(agent: DeepAgent, flat: FlatParameters, online: QNetwork, target: QNetwork | None) -> Gradient:
    from qfleet.accel.nature import NatureGradient

    return NatureGradient(agent, flat, online, target)


def workload_of(setup: FusedSetup) -> Workload:
    """Return what this run computes, as far as it decides which settings are fast."""
    agent, network = setup.agent, setup.network.model_dump(mode="json")
    assert isinstance(agent, ReplayAgent | RolloutAgent)
    if setup.code.network is not None:
        network["class"] = f"{setup.code.network.__module__}:{getattr(setup.code.network, '__qualname__', '')}"
    batch = setup.learner.batch_size
    if isinstance(agent, RolloutAgent):
        batch = setup.actor.envs * agent.rollout_length // agent.minibatches
    return Workload(
        agent=agent.model_dump(mode="json", exclude=_SAME_WORK),
        network=network,
        optim=setup.optim.kind,
        sampler=setup.replay.sampler.kind if isinstance(agent, ReplayAgent) else "",
        observations={name: leaf.model_dump(mode="json") for name, leaf in setup.spec.observations.items()},
        actions=setup.spec.actions,
        envs=setup.actor.envs,
        batch=batch,
    )


def keep_channels_last(network: nn.Module) -> None:
    """Let each convolution get its images with their channels last in memory; the ones after the first have it so."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(_channels_last)


def _channels_last(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0].contiguous(memory_format=torch.channels_last)


def _obstacles(setup: FusedSetup, network: QNetwork) -> dict[str, str]:
    """Return the settings that this network or its optimiser cannot use, with the reason."""
    agent, device = setup.agent, torch.device(setup.device)
    assert isinstance(agent, ReplayAgent | RolloutAgent)
    obstacles = {}
    if not can_compile(network, agent):
        obstacles["compile"] = "this loss draws random numbers"
    if device.type == "cpu":
        if not is_small_mlp(network, agent):
            obstacles["kernels"] = "none for this network on a CPU"
    elif not steps.supports(setup.optim, device):
        obstacles["kernels"] = f"none for optim.kind '{setup.optim.kind}'"
    if not any(isinstance(module, nn.Conv2d) for module in network.modules()):
        obstacles["channels_last"] = "there are no convolutions"
    return obstacles
