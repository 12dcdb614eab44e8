"""Finds what keeps a GPU waiting whose learner is given batches of rows as fast as it takes them; prints a table.

    python benchmarks/gpu/learner_gaps.py [--draws 1 4 16] [--seconds 3] [--profiled 40]

The learner is that of `atari:pong` in processes, with a mirror of the replay, and batches that a real replay drew, but
nobody else is at work: no stream, no actor, no other process. For each number of updates drawn at once: microseconds
an update takes, those that Python is at work for it (its calls for a few batches, when nothing is queued before them),
those in which kernels run, and the share of time in which they do. Where Python takes longer than the kernels the GPU
waits for it; where neither explains what an update takes, copies and gaps between kernels do. Without a GPU the last
two are missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from qfleet.accel.graphs import WARMUPS
from qfleet.accel.staging import SLOTS
from qfleet.bench.feed import busy
from qfleet.control.feeding import ReplayRows
from qfleet.control.pieces import experience
from qfleet.core import codec
from qfleet.core.types import Batch
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import with_changes
from qfleet.presets import preset
from qfleet.replay import Replay
from qfleet.roles.learner import Learner
from qfleet.roles.learning import build_learning
from qfleet.roles.updating import Updating
from qfleet.setups import learner_setup

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, STREAMS, VARIETY = 20_000, 8, 64
UNQUEUED = 2
"""Batches that are taken without waiting for the device: one fewer than there are slots for them."""


def fed(updates: int) -> tuple[Updating, Iterator[Batch]]:
    """Return a learner's way to learn, and batches for it, each of which brings the rows that came since the last."""
    experiment = with_changes(
        preset("atari:pong"),
        {"placement": "processes", "actors": 1, "device": DEVICE, "learner.updates_per_draw": updates,
         "replay.storage.kind": "ram", "replay.capacity": ROWS, "learner.learning_starts": 1000},
    )  # fmt: skip
    spec = env_spec(experiment.env)
    setup = learner_setup(experiment, spec, UserCode(), None)
    rng = np.random.default_rng(0)
    replay = Replay(experiment.replay, spec, streams=STREAMS, n_step=1, gamma=0.99, rng=rng)
    replay.store.mirror()
    numbers = itertools.count()
    message = experience(spec, max(1, updates // STREAMS), STREAMS)  # a step for each update, but at least eight

    def drawn() -> Batch:
        replay.append(dataclasses.replace(message, sequence=next(numbers)))
        return codec.roundtrip(replay.sample(setup.learner.batch_size, updates=updates))  # type: ignore[no-any-return]

    for _ in range(ROWS // (2 * len(message.action))):
        replay.append(dataclasses.replace(message, sequence=next(numbers)))
    drawn()  # what was stored until now is not for one of the batches to bring up
    learning = build_learning(setup, Learner.kind, None)
    learning.look_at(ReplayRows(replay), setup, whole=True)
    return learning.updating(setup), itertools.cycle([drawn() for _ in range(VARIETY)])


def learn(updating: Updating, batches: Iterator[Batch], count: int) -> None:
    """Learn from so many batches."""
    for batch in itertools.islice(batches, count):
        updating.advance(batch)
        updating.finished()


def settle() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(updating: Updating, batches: Iterator[Batch], count: int, seconds: float) -> float:
    """Return what a batch takes when batches follow each other without a break."""
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        learn(updating, batches, count)
        done += count
    settle()
    return (time.perf_counter() - began) / done


def host_seconds(updating: Updating, batches: Iterator[Batch], tries: int = 50) -> float:
    """Return what Python takes for a batch while nothing is queued before it: the median."""
    found = []
    for _ in range(tries):
        settle()
        began = time.perf_counter()
        learn(updating, batches, UNQUEUED)
        found.append((time.perf_counter() - began) / UNQUEUED)
    return float(np.median(found))


def kernels(updating: Updating, batches: Iterator[Batch], count: int) -> tuple[float, float]:
    """Return the seconds in which kernels run for a batch, and the share of a profile's time that these are."""
    settle()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        learn(updating, batches, count)
        settle()
        spent = time.perf_counter() - began
    share = busy(profiler.events(), 0)["kernels_busy"]
    return share * spent / count, share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--profiled", type=int, default=40)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}, torch {torch.__version__}; us an update")
    print("| updates at once | an update | Python | kernels | share of time in which kernels run |")
    print("|---|---|---|---|---|")
    for updates in options.draws:
        updating, batches = fed(updates)
        count = max(1, 16 // updates)
        learn(updating, batches, SLOTS * (WARMUPS + 2))  # recordings are made, memory is there
        whole = 1e6 * seconds_of(updating, batches, count, options.seconds) / updates
        host = 1e6 * host_seconds(updating, batches) / updates if DEVICE == "cuda" else None
        run = kernels(updating, batches, options.profiled) if DEVICE == "cuda" else None
        python = "" if host is None else f"{host:,.0f}"
        shown = ("", "") if run is None else (f"{1e6 * run[0] / updates:,.0f}", f"{run[1]:.0%}")
        print(f"| {updates} | {whole:,.0f} | {python} | {shown[0]} | {shown[1]} |", flush=True)


if __name__ == "__main__":
    main()
