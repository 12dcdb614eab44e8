"""Builds what a gradient worker learns with: an update whose steps are made by the parameter servers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from qfleet.accel.choices import Choices, Job, choose
from qfleet.accel.choose import workload
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.networks import QNetwork
from qfleet.algo.optim import OptimConfig
from qfleet.algo.steps import GradientHook, Step
from qfleet.algo.updates import Update, build_update
from qfleet.core import seeding
from qfleet.core.errors import ConfigError
from qfleet.roles.learner_setup import LearnerSetup
from qfleet.roles.remote_step import RemoteStep
from qfleet.roles.serving_setup import ServingSetup, first_network


@dataclass(frozen=True)
class RemoteLearning:
    """An update on its device, and how a person would describe it."""

    update: Update
    step: RemoteStep
    """What the update leaves its gradients in."""
    choices: Choices | None
    """How gradients are computed; None for sequences, for which there is one way only."""
    notices: dict[str, str]
    """What a person should know, by kind."""


def build_remote_learning(setup: ServingSetup) -> RemoteLearning:
    """Build the network and its update on the worker's device."""
    learner, device = setup.learner, torch.device(setup.learner.device)
    _check(learner)
    network, notices = first_network(learner)
    network = network.to(device)
    # In step the workers draw the same noise, as the ranks of a learner group do; else each draws its own.
    role = "learner" if setup.serving.mode == "sync" or setup.index == 0 else f"worker-{setup.index}"
    generator = seeding.torch_stream(learner.seed, role, purpose="update", device=device)
    choices = None if network.recurrent else _choose(learner, network, device)
    if choices is not None:
        notices["accel"] = choices.description
    step = RemoteStep(network, _limit(setup), None if choices is None else choices.scale)

    def stepper(online: QNetwork, optim: OptimConfig, total_updates: int | None, hook: GradientHook | None) -> Step:
        return step

    gradient = EagerGradient if choices is None else choices.gradient
    update = build_update(learner.agent, network, learner.optim, generator, None, None, gradient, stepper)
    return RemoteLearning(update, step, choices, notices)


def _check(learner: LearnerSetup) -> None:
    """Refuse what makes several updates of one message: a worker computes one gradient and waits for its weights."""
    if not isinstance(learner.agent, ReplayAgent):
        raise ConfigError(f"parameter servers need agent.kind 'replay', not '{learner.agent.kind}'")
    if learner.learner.updates_per_draw > 1:
        raise ConfigError("parameter servers need learner.updates_per_draw 1")


def _choose(learner: LearnerSetup, network: QNetwork, device: torch.device) -> Choices:
    barred = {"graphs": "the servers make the steps"}
    assert isinstance(learner.agent, ReplayAgent)
    work = workload(learner.agent, learner.network, learner.optim, learner.spec, learner.code)
    return choose(Job(learner.accel, learner.agent, learner.optim, device, work, barred), network)


def _limit(setup: ServingSetup) -> float:
    """Return the largest norm of a worker's gradient: the sum of a round's parts keeps to that of the settings."""
    most = setup.learner.optim.max_grad_norm
    if most is None:
        return math.inf
    return most / setup.workers if setup.serving.mode == "sync" else most
