"""How a fused run is computed: what it is, in the words of `accel.choices`, which decides."""

from __future__ import annotations

import torch

from qfleet.accel.choices import Choices, Job
from qfleet.accel.choices import choose as choose_for
from qfleet.accel.choose import Workload, workload
from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.networks import QNetwork
from qfleet.roles.fused.setup import FusedSetup


def choose(setup: FusedSetup, network: QNetwork) -> Choices:
    """Return how to compute the updates of this run; see `accel.choices.choose` for what it changes."""
    assert isinstance(setup.agent, ReplayAgent | RolloutAgent)
    device, work = torch.device(setup.device), workload_of(setup)
    barred = {} if setup.group is None else {"graphs": "ranks sum their gradients before each step"}
    return choose_for(Job(setup.accel, setup.agent, setup.optim, device, work, barred, setup.former), network)


def workload_of(setup: FusedSetup) -> Workload:
    """Return what this run computes, as far as it decides which settings are fast."""
    agent, batch = setup.agent, setup.batch
    assert isinstance(agent, ReplayAgent | RolloutAgent)
    if isinstance(agent, RolloutAgent):
        batch = setup.envs * agent.rollout_length // agent.minibatches
    return workload(
        agent,
        setup.network,
        setup.optim,
        setup.spec,
        setup.code,
        sampler=setup.replay.sampler.kind if isinstance(agent, ReplayAgent) else "",
        envs=setup.envs,
        batch=batch,
    )
