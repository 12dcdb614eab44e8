"""Refuses a run that the shared memory of this machine is too small for, before it begins; shows the arithmetic."""

from __future__ import annotations

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.networks import build_network
from qfleet.core.errors import ConfigError
from qfleet.core.spec import EnvSpec
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment
from qfleet.program import prefetch
from qfleet.replay.store import row_bytes
from qfleet.runtime.memory import ELSEWHERE, free_bytes, shared_memory_root
from qfleet.setups import shard_setup

_SLOT = 1.25
"""Slots are made larger than their first message, so that the next ones fit too."""
_NETWORK_COPIES = 16
"""Of the parameters: two of all that the learner's next life would go on from (weights, target, two moments), two of
the evaluator's, two of the newest weights, one on its way to be evaluated, and a few that were found best."""


def require_shared_memory(experiment: Experiment, spec: EnvSpec, code: UserCode, free: int | None = None) -> None:
    """Raise ConfigError when what the roles share takes more than `free` bytes; by default what there is now."""
    if experiment.placement == "inline" or experiment.fused:
        return
    needed, free = shared_bytes(experiment, spec, code), free_bytes() if free is None else free
    total, largest = sum(needed.values()), max(needed, key=needed.__getitem__)
    if total <= free:
        return
    terms = " + ".join(f"{name} {size / 1e6:,.1f}" for name, size in needed.items())
    raise ConfigError(
        f"shared memory is too small: this run takes about {total / 1e6:,.1f} MB ({terms}), but {free / 1e6:,.1f} MB "
        f"are free in {shared_memory_root()}; make it larger (docker run --shm-size=...), name another folder by "
        f"{ELSEWHERE}, lower {largest}, or run with --placement inline"
    )


def crossing_bytes(experiment: Experiment, spec: EnvSpec, code: UserCode) -> float:
    """Return about how many bytes may be on their way between machines at once: experience, and the newest weights.

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
    row = row_bytes(experiment.replay.storage, spec, shard.sequence is not None, shard.extras)
    drawn = experiment.learner.batch_size * experiment.learner.updates_per_draw
    batches = experiment.replay_parts * slots * drawn * experiment.parallel.split
    return {
        "replay.capacity": experiment.replay.capacity * row,
        "learner.batch_size": batches * steps * stacks,
        "actor.envs": rows * experiment.actor.unroll * frames,
        **needed,
    }
