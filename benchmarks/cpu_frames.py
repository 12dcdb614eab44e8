"""Updates and values of networks that see frames, on CPU cores, by how they are computed; prints a table.

    python benchmarks/cpu_frames.py [--threads 1] [--rounds 5]

An update is that of the preset `atari:pong`, with its optimiser, from batches of 32; values are those of 32
observations. The ways take turns, and each figure is the median of its rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from qfleet.accel.choices import Job, choose
from qfleet.accel.choose import workload
from qfleet.algo.networks import build_network
from qfleet.algo.updates import build_update
from qfleet.control.pieces import batch as empty_batch
from qfleet.core.types import Batch, Leaves
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply

BATCH = 32
CASES = {"DQN, Nature network": "dqn", "Beyond the Rainbow, IMPALA": "beyond"}
WAYS = {
    f"{'oneDNN' if kernels == 'on' else 'BLAS'}, channels {'last' if last == 'on' else 'first'}": (kernels, last)
    for kernels, last in product(("off", "on"), ("off", "on"))
}


def work(experiment: Experiment, kernels: str, last: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return an update and a valuation, computed in one way."""
    changed = with_changes(experiment, {"accel.channels_last": last})
    if kernels == "off":
        changed = with_changes(changed, {"accel.kernels": "off"})
    spec = env_spec(changed.env)
    network = build_network(changed.network, changed.agent, spec, seed=0)
    about = workload(changed.agent, changed.network, changed.optim, spec, UserCode())
    chosen = choose(Job(changed.accel, changed.agent, changed.optim, torch.device("cpu"), about), network)
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    update = build_update(
        changed.agent, network, changed.optim, generator, gradient=chosen.gradient, stepper=chosen.stepper
    )
    batch = empty_batch(spec, BATCH)
    batch = replace(batch, observation=_noise(rng, batch.observation), weight=np.ones(BATCH, np.float32))
    seen = {name: torch.from_numpy(leaf) for name, leaf in batch.observation.items()}

    def values() -> None:
        with torch.inference_mode():
            network.q(seen)

    def learn(message: Batch = batch) -> None:
        update(message)

    return learn, values


def _noise(rng: np.random.Generator, leaves: Leaves) -> Leaves:
    return {name: rng.integers(256, size=leaf.shape, dtype=np.uint8) for name, leaf in leaves.items()}


def milliseconds(piece: Callable[[], Any], seconds: float = 0.5) -> float:
    """Return how long a piece of work takes."""
    piece()
    calls, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        piece()
        calls += 1
    return 1e3 * spent / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"{options.threads} threads\n\n| network | way | an update of {BATCH} | values of {BATCH} |\n|---|---|---|---|"
    )
    for name, algo in CASES.items():
        experiment = apply(preset("atari:pong"), algo)
        ways = {way: work(experiment, *settings) for way, settings in WAYS.items()}
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, (learn, values) in ways.items():
                found[way].append((milliseconds(learn), milliseconds(values)))
        for way, times in found.items():
            update, valued = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"| {name} | {way} | {update:.1f} ms | {valued:.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
