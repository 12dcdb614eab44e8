"""Refuses a fused run that would not fit its device, before it begins, and shows the arithmetic."""

from __future__ import annotations

import math

import torch

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.core.errors import ConfigError
from qfleet.core.spec import EnvSpec
from qfleet.parallel.devices import sharers
from qfleet.replay.grid import grid_bytes, largest_length
from qfleet.replay.memory import available_memory
from qfleet.roles.fused.setup import FusedSetup

MODEL_COPIES = 6
"""Arrays as long as the parameters: weights, target, gradient, two moments, and the network that is evaluated."""
PASS_COPIES = 12
"""How much a forward and a backward pass keep, in multiples of their observations as float32: about the most of the
built-in image networks. Vectors are so small that it does not matter."""
ROLLOUT_COPIES = 3
"""A rollout's observations lie as ticks, as one batch, and as the batch that they bootstrap from."""
WORKSPACE = {"cpu": 0, "cuda": 512 * 2**20}
"""What the matrix libraries and a recording take besides."""
_SMALLER = "Lower actor.envs, learner.batch_size, evaluation.episodes or the network's size."


def require_memory(setup: FusedSetup, parameters: int, available: int | None = None) -> None:
    """Raise ConfigError when the run of a network with so many parameters does not fit `available` bytes.

    Without `available`, it is what this process has or can still get on its device: its share where several have that.
    """
    if available is None:
        available = device_memory(torch.device(setup.device)) // sharers(setup.device, setup.ranks)
    passes = {
        ("passes" if setup.device == "cpu" else "passes and recording"): pass_bytes(setup),
        "evaluation": evaluation_bytes(setup),
    }
    fixed = {"model": 4 * MODEL_COPIES * parameters, **passes}
    data, name = data_bytes(setup)
    if data + sum(fixed.values()) <= available:
        return
    terms = " + ".join(f"{what} {_gib(size)}" for what, size in {name: data, **fixed}.items())
    raise ConfigError(
        f"this run does not fit the memory of device '{setup.device}': {terms} = {_gib(data + sum(fixed.values()))},"
        f" but {_gib(available)} are available. {_advice(setup, available - sum(fixed.values()))}"
    )


def device_memory(device: torch.device) -> int:
    """Return the bytes that this process holds or can still get for tensors on the device."""
    if device.type != "cuda":
        return available_memory()
    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)


def data_bytes(setup: FusedSetup) -> tuple[int, str]:
    """Return the bytes of what is learned from, and its name: a replay or a rollout."""
    agent, envs = setup.agent, setup.actor.envs
    if isinstance(agent, ReplayAgent):
        length = max(setup.replay.capacity // envs, 1)
        return grid_bytes(setup.spec, length, setup.envs, agent.n_step, setup.replay.sampler), "replay"
    assert isinstance(agent, RolloutAgent)
    return _rollout_bytes(setup.spec, agent) * setup.envs, "rollout"


def pass_bytes(setup: FusedSetup) -> int:
    """Return about how many bytes one update takes besides what is kept."""
    samples = 2 * setup.batch
    if isinstance(setup.agent, RolloutAgent):
        # All of a rollout is valued at once; that pass keeps nothing for a gradient, but its layers are as wide.
        samples = setup.envs * setup.agent.rollout_length
    return WORKSPACE.get(torch.device(setup.device).type, 0) + samples * _sample_bytes(setup.spec)


def evaluation_bytes(setup: FusedSetup) -> int:
    """Return about how many bytes it takes to play all episodes of an evaluation at once."""
    return setup.evaluation.episodes * _sample_bytes(setup.spec)


def _sample_bytes(spec: EnvSpec) -> int:
    """Return about how many bytes the passes of one sample take."""
    return 4 * PASS_COPIES * sum(math.prod(leaf.shape) for leaf in spec.observations.values())


def _rollout_bytes(spec: EnvSpec, agent: RolloutAgent) -> int:
    """Return the bytes of one environment's rollout."""
    row = sum(leaf.frame_bytes * leaf.stack for leaf in spec.observations.values())
    return ROLLOUT_COPIES * row * agent.rollout_length


def _advice(setup: FusedSetup, left: int) -> str:
    """Return what would fit in the bytes that are left beside model and passes."""
    agent, envs = setup.agent, setup.envs
    if isinstance(agent, RolloutAgent):
        each = _rollout_bytes(setup.spec, agent) + agent.rollout_length * _sample_bytes(setup.spec)
        fitting = (left + envs * agent.rollout_length * _sample_bytes(setup.spec)) // each * setup.ranks
        return f"Lower actor.envs to at most {fitting:,}." if fitting > 0 else _SMALLER
    assert isinstance(agent, ReplayAgent)
    stack = max(leaf.stack for leaf in setup.spec.observations.values())
    length = largest_length(setup.spec, envs, agent.n_step, setup.replay.sampler, max(left, 0))
    if length < agent.n_step + stack:
        return f"No replay.capacity would fit: {_SMALLER}"
    return f"Lower replay.capacity to at most {length * setup.actor.envs:,}."


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
