"""Times single pieces of an experiment's work: an environment's step, a network's values, a message, a copy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import torch

from qfleet.accel.onednn import compute_by_onednn
from qfleet.accel.precision import Precision
from qfleet.accel.rounded import Rounded
from qfleet.algo.networks import build_network
from qfleet.core import codec, seeding
from qfleet.core.spec import EnvSpec
from qfleet.core.types import Batch, Bools, Experience, InferenceRequest, Ints, Leaves, Version
from qfleet.core.usercode import UserCode
from qfleet.envs import make_env
from qfleet.experiment import Experiment

PIECE_S = 0.15
"""How long each piece is timed."""
ROUNDS = 3
ROW_EXTRA = 40
"""Bytes that a replay keeps for each row besides the observation: action, reward, flags, links, priority."""
COPIED = 1 << 26
"""Bytes of the copy that is timed."""


def tick_seconds(experiment: Experiment, code: UserCode, envs: int) -> float:
    """Return the seconds of one step of a vector of environments, with random actions."""
    rng = np.random.default_rng(0)
    with closing(make_env(experiment.env, envs, factory=code.env)) as env:
        _, mask = env.reset(seeding.episode_seeds(experiment.seed, "training", envs))

        def tick() -> None:
            nonlocal mask
            mask = env.step(_random(rng, envs, env.spec.actions, mask)).mask

        return seconds_of(tick)


def _random(rng: np.random.Generator, envs: int, actions: int, mask: Bools | None) -> Ints:
    """Return an allowed action for each environment [E]."""
    if mask is None:
        return rng.integers(actions, size=envs)
    return np.asarray(np.where(mask, rng.random(mask.shape), -1.0).argmax(1), np.int64)


def act_seconds(
    experiment: Experiment, spec: EnvSpec, code: UserCode, batch: int, device: str, precision: Precision = "fp32"
) -> float:
    """Return the seconds in which a network values a batch of observations; on a GPU with the copies.

    On a CPU its products are computed in the format `precision`.
    """
    network = build_network(experiment.network, experiment.agent, spec, seed=experiment.seed, custom=code.network).to(
        device
    )
    network.explore()
    if device == "cpu":
        compute_by_onednn(network, experiment.accel, foreign=code.network is not None)
    rounded = Rounded(network, precision if device == "cpu" else "fp32", foreign=code.network is not None)
    observation = {name: torch.from_numpy(leaf) for name, leaf in _zeros(spec, batch, stacked=True).items()}
    state = network.initial_state(batch)

    def act() -> None:
        seen = {name: leaf.to(device) for name, leaf in observation.items()}
        with torch.inference_mode(), rounded.computing():
            (network.recall(seen, state.to(device))[0] if network.recurrent else network.q(seen)).cpu()

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return seconds_of(act)
    finally:
        torch.set_num_threads(before)


def experience_seconds(spec: EnvSpec, rows: int) -> float:
    """Return the seconds of packing, copying and unpacking experience of so many rows."""
    message = experience(spec, ticks=1, streams=rows)
    return seconds_of(lambda: codec.roundtrip(message))


def batch_seconds(spec: EnvSpec, rows: int) -> float:
    """Return the seconds of packing, copying and unpacking a batch of so many transitions."""
    message = batch(spec, rows)
    return seconds_of(lambda: codec.roundtrip(message))


def request_seconds(spec: EnvSpec, rows: int) -> float:
    """Return the seconds of packing, copying and unpacking so many observations for an inference server."""
    message = InferenceRequest(0, _zeros(spec, rows, stacked=True), np.zeros((rows, 0), np.float32))
    return seconds_of(lambda: codec.roundtrip(message))


def stored_bytes(spec: EnvSpec, batch: int) -> tuple[int, int]:
    """Return the bytes of one stored row, before compression, and of one batch."""
    row = sum(leaf.frame_bytes for leaf in spec.observations.values()) + ROW_EXTRA
    seen = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in spec.observations.values())
    return row, batch * (2 * seen + ROW_EXTRA)


def copy_rate() -> float:
    """Return the bytes a second that go from pinned memory to the GPU."""
    source = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPIED, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return COPIED / seconds_of(copy)


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of a piece of work in the quietest round, after a warm-up."""
    work()
    rounds = []
    for _ in range(ROUNDS):
        calls, began, spent = 0, time.perf_counter(), 0.0
        while spent < PIECE_S / ROUNDS:
            work()
            calls, spent = calls + 1, time.perf_counter() - began
        rounds.append(spent / calls)
    return min(rounds)


def _zeros(spec: EnvSpec, rows: int, stacked: bool) -> Leaves:
    return {
        name: np.zeros((rows, *(leaf.shape if stacked else leaf.frame_shape)), leaf.dtype)
        for name, leaf in spec.observations.items()
    }


def experience(spec: EnvSpec, ticks: int, streams: int) -> Experience:
    """Return so many ticks of streams that never end, with empty observations."""
    rows = ticks * streams
    flags = np.zeros(rows, np.bool_)
    return Experience(
        source="actor-0",
        sequence=0,
        version=Version(),
        offsets=np.arange(0, rows + 1, streams),
        stream=np.tile(np.arange(streams), ticks),
        observation=_zeros(spec, rows, stacked=False),
        action=np.zeros(rows, np.int64),
        reward=np.zeros(rows, np.float32),
        terminated=flags,
        truncated=flags,
        final=flags,
        mask=np.ones((rows, spec.actions), np.bool_) if spec.masked else None,
    )


def batch(spec: EnvSpec, rows: int) -> Batch:
    """Return a batch of so many transitions of nothing."""
    integers, floats = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    return Batch(
        observation=_zeros(spec, rows, stacked=True),
        action=integers,
        reward=floats,
        discount=floats,
        next_observation=_zeros(spec, rows, stacked=True),
        weight=floats,
        index=integers,
        generation=integers,
    )
