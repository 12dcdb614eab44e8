"""Refuses a run that the shared memory of this machine is too small for, before it begins; shows the arithmetic."""

from __future__ import annotations

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.networks import build_network
from qfleet.core.errors import ConfigError
from qfleet.core.shared_memory import REMEDY, TOO_SMALL, shared_memory_root
from qfleet.core.spec import EnvSpec
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment
from qfleet.program import ASKED, prefetch
from qfleet.roles.inference_server import ServedInference
from qfleet.runtime.memory import free_bytes
from qfleet.setups import shard_setup

_SLOT = 1.25
"""Slots are made larger than their first message, so that the next ones fit too."""
_NETWORK_COPIES = 19
"""Of the parameters: two of all that the learner's next life would go on from (weights, target, two moments), two of
the evaluator's, two of the newest weights, one on its way to be evaluated, a few that were found best, and three of the
final test, which begins while all others are still there."""


def require_shared_memory(experiment: Experiment, spec: EnvSpec, code: UserCode) -> None:
    """Raise ConfigError when what the roles share takes more than is free now."""
    if experiment.placement == "inline" or experiment.fused:
        return
    if problem := lack_of_shared_memory(experiment, spec, code, free_bytes()):
        raise ConfigError(problem)


def lack_of_shared_memory(experiment: Experiment, spec: EnvSpec, code: UserCode, free: int) -> str:
    """Return that `free` bytes are too little for what the roles share, and what to do; empty where they suffice."""
    needed = shared_bytes(experiment, spec, code)
    total, largest = sum(needed.values()), max(needed, key=needed.__getitem__)
    if total <= free:
        return ""
    terms = " + ".join(f"{name} {size / 1e6:,.1f}" for name, size in needed.items())
    return (
        f"{TOO_SMALL}: this run takes about {total / 1e6:,.1f} MB ({terms}), but {free / 1e6:,.1f} MB are free in"
        f" {shared_memory_root()}; {REMEDY}, lower {largest}, or run with --placement inline"
    )


def crossing_bytes(experiment: Experiment, spec: EnvSpec, code: UserCode) -> float:
    """Return about how many bytes may be on their way between machines at once: experience, requests for inference and
    their replies, and the newest weights.

    Where learner ranks are on other nodes, batches too.
    """
    if experiment.placement != "ray":
        return 0.0
    needed = shared_bytes(experiment, spec, code)
    drawn = needed["learner.batch_size"] if experiment.parallel.across_nodes else 0.0
    return needed["actor.envs"] + needed["network"] / _NETWORK_COPIES + drawn


def shared_bytes(experiment: Experiment, spec: EnvSpec, code: UserCode) -> dict[str, float]:
    """Return about how many bytes of shared memory a run takes, by the setting that each part follows from."""
    slots, agent = prefetch(experiment) * _SLOT, experiment.agent
    frames = sum(leaf.frame_bytes for leaf in spec.observations.values())
    stacks = sum(leaf.frame_bytes * leaf.stack for leaf in spec.observations.values())
    rows = experiment.seats * experiment.actor.envs * slots
    network = build_network(experiment.network, experiment.agent, spec, seed=0, custom=code.network)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    needed = {"network": 4.0 * parameters * _NETWORK_COPIES * _SLOT}
    if not isinstance(agent, ReplayAgent):
        ticks = agent.rollout_length if isinstance(agent, RolloutAgent) else experiment.actor.unroll
        return {**needed, "actor.envs": rows * ticks * stacks}
    shard = shard_setup(experiment, spec, shared_memory_root())
    steps = 2 if shard.sequence is None else shard.sequence.length + 1
    row = shard.row_bytes(experiment.replay.storage)
    drawn = experiment.learner.batch_size * experiment.learner.updates_per_draw
    batches = experiment.replay_parts * slots * drawn * experiment.parallel.split
    return {
        "replay.capacity": experiment.replay.capacity * row,
        "learner.batch_size": batches * steps * stacks,
        "actor.envs": rows * experiment.actor.unroll * frames + _asking_bytes(experiment, agent, spec, stacks),
        **needed,
    }


def _asking_bytes(experiment: Experiment, agent: ReplayAgent, spec: EnvSpec, stacks: float) -> float:
    """Return what requests to inference servers and their replies take: observations, memory there and back, values."""
    if not isinstance(experiment.inference, ServedInference):
        return 0.0
    memory = 0 if agent.memory is None else 4 * (2 * agent.memory.hidden + 1)
    # Environments that come back as they are ready may all be in one part, and every part has its own streams.
    whole = experiment.actor.groups if getattr(experiment.env, "vectorisation", "sync") == "async" else 1
    rows = experiment.seats * experiment.actor.envs * whole * ASKED * _SLOT
    return rows * (stacks + memory + 4 * spec.actions + memory)
