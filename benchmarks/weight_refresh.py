"""Counts the bytes of weights on their way to actors, and how far they are from the learner's: the Nature network.

    python benchmarks/weight_refresh.py [--publications 64] [--sweep]      (extra: atari)

A DQN with the settings of atari:pong learns from frames of random play. Its weights are published every 32 updates in
each form, and the forms are compared on the same weights. `error` is the root mean square of what the actors' weights
are off by, `value error` the mean of what their values of 128 frames are off by, both as a share of how far the
learner's go from one publication to the next. `same action` is how often both prefer the same one. "int8, every 4th"
is what could be had without deltas: actors keep what they have in between. `--sweep` compares other settings of the
deltas that take about as many bytes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.updates import build_update
from qfleet.core.spec import PLAIN
from qfleet.core.types import Batch, Floats, Version
from qfleet.envs import make_env
from qfleet.experiment import Experiment
from qfleet.parallel.packing import Packer, Unpacker, packed_bytes
from qfleet.parallel.packing_config import Bf16Weights, DeltaWeights, Int8Weights
from qfleet.presets import preset
from qfleet.roles.weight_store import snapshot

ENVS, TICKS, TRIED = 8, 500, 128
PERIOD, BATCH = 32, 32
Form = Bf16Weights | Int8Weights | DeltaWeights | None


@dataclass
class Played:
    """Frames of random play, one transition a row."""

    observation: np.ndarray  # [N, 4, 84, 84]
    next_observation: np.ndarray
    action: np.ndarray  # [N]
    reward: np.ndarray
    terminated: np.ndarray

    def batch(self, rng: np.random.Generator) -> Batch:
        """Return a batch of transitions drawn at random."""
        rows = rng.integers(len(self.action), size=BATCH)
        return Batch(
            {PLAIN: self.observation[rows]},
            self.action[rows],
            self.reward[rows],
            np.where(self.terminated[rows], 0.0, 0.99).astype(np.float32),
            {PLAIN: self.next_observation[rows]},
            np.ones(BATCH, np.float32),
            rows,
            np.zeros(BATCH, np.int64),
            global_size=BATCH,
        )


def play(experiment: Experiment, rng: np.random.Generator) -> Played:
    """Return what random play sees."""
    with closing(make_env(experiment.env, ENVS)) as env:
        seen = [env.reset(range(ENVS))[0][PLAIN]]
        actions, rewards, ends = [], [], []
        for _ in range(TICKS):
            actions.append(rng.integers(env.spec.actions, size=ENVS))
            tick = env.step(actions[-1])
            seen.append(tick.observation[PLAIN])
            rewards.append(tick.reward)
            ends.append(tick.terminated | ~tick.valid)
    return Played(
        np.concatenate(seen[:-1]),
        np.concatenate(seen[1:]),
        np.concatenate(actions),
        np.concatenate(rewards),
        np.concatenate(ends),
    )


@dataclass
class Follower:
    """An actor that follows the weights in one form."""

    name: str
    form: Form
    every: int = 1
    """Publications from one that it takes to the next."""
    packer: Packer | None = None
    unpacker: Unpacker | None = None
    weights: Floats | None = None
    sizes: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    value_errors: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)

    def follow(self, flat: FlatParameters, number: int) -> None:
        """Take the weights of one publication."""
        weights, size = snapshot(flat, Version(0, number), 0), len(flat.parameters)
        if number % self.every:
            self.sizes.append(0)
        elif self.form is None:
            self.weights = weights.flat
            self.sizes.append(weights.flat.nbytes)
        else:
            self.packer, self.unpacker = self.packer or Packer(self.form, size), self.unpacker or Unpacker(size)
            keyframe, message = self.packer.pack(weights)
            if keyframe is not None:
                self.unpacker.remember(keyframe)
            self.weights = self.unpacker.verified(message)
            self.sizes.append(packed_bytes(message) + (0 if keyframe is None else packed_bytes(keyframe)))


def published(experiment: Experiment, played: Played, publications: int) -> Iterator[FlatParameters]:
    """Yield the learner's weights at each publication."""
    with closing(make_env(experiment.env, 1)) as env:
        network = build_network(experiment.network, experiment.agent, env.spec, seed=1)
    update = build_update(experiment.agent, network, experiment.optim, torch.Generator().manual_seed(1))
    rng = np.random.default_rng(2)
    for _ in range(publications):
        for _ in range(PERIOD):
            update(played.batch(rng))
        yield update.flat


def compare(followers: list[Follower], experiment: Experiment, publications: int) -> None:
    """Let all followers see the same publications."""
    rng = np.random.default_rng(0)
    played = play(experiment, rng)
    tried = {PLAIN: torch.from_numpy(played.observation[rng.integers(len(played.action), size=TRIED)])}
    with closing(make_env(experiment.env, 1)) as env:
        actor = build_network(experiment.network, experiment.agent, env.spec, seed=1)
    acting, before, valued = FlatParameters(actor), None, np.zeros(0)
    for number, flat in enumerate(published(experiment, played, publications)):
        true = flat.to_numpy()
        went = None if before is None else float(np.sqrt(np.mean((true - before) ** 2)))
        before = true
        seen, valued = valued, values(acting, actor, true, tried)
        for follower in followers:
            follower.follow(flat, number)
            assert follower.weights is not None
            if went is not None:
                follower.errors.append(float(np.sqrt(np.mean((follower.weights - true) ** 2))) / went)
                own = values(acting, actor, follower.weights, tried)
                follower.same.append(float((own.argmax(1) == valued.argmax(1)).mean()))
                follower.value_errors.append(float(np.abs(own - valued).mean() / np.abs(valued - seen).mean()))


def values(
    flat: FlatParameters, network: QNetwork, weights: Floats, observation: dict[str, torch.Tensor]
) -> np.ndarray:
    """Return the values [TRIED, A] that a network with these weights has."""
    flat.load_numpy(weights)
    with torch.inference_mode():
        found: np.ndarray = network.q(observation).numpy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publications", type=int, default=64)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    followers = [
        Follower("none", None),
        Follower("bf16", Bf16Weights()),
        Follower("int8", Int8Weights()),
        Follower("int8, every 4th", Int8Weights(), every=4),
        Follower("delta", DeltaWeights()),
    ]
    if arguments.sweep:
        pairs = [(8, 0.068), (32, 0.116), (64, 0.123)]
        followers += [
            Follower(f"delta {density} / {period}", DeltaWeights(density=density, keyframe_period=period))
            for period, density in pairs
        ]
    compare(followers, preset("atari:pong"), arguments.publications)
    print("| form | MB a publication | error | value error | same action |\n|---|---|---|---|---|")
    for one in followers:
        errors = f"{np.mean(one.errors):.2f} | {np.mean(one.value_errors):.3f}"
        print(f"| {one.name} | {np.mean(one.sizes) / 1e6:.3f} | {errors} | {np.mean(one.same):.1%} |")


if __name__ == "__main__":
    main()
