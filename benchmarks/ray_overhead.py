"""What Ray costs on one machine: steps/s of the same run in placements `processes` and `ray`, in turns.

    python benchmarks/ray_overhead.py [--rounds 3] [--env-steps 30000] [--actors 1 2]

A DQN on CartPole-v1 with small updates, so that edges and hosts count. Each round runs both placements, and the ratio
is that of the round; the table has the median and the range. CPU time is that of all processes of a run, Ray's own
included, in the second half of its steps: other load on the machine changes it little, and a spare that imports torch
is not counted. Ray is started once; the seconds until a run's roles are built are told apart from training.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil

import qfleet.api as api
from qfleet.control.monitor import Callbacks
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.runtime.ray_cluster import start_local, stop_local


def experiment(placement: str, actors: int, env_steps: int) -> Experiment:
    changes = {
        "env.kind": "gym",
        "env.id": "CartPole-v1",
        "env.reward_scale": 0.005,
        "placement": placement,
        "actors": actors,
        "env_steps": env_steps,
        "learner.learning_starts": 500,
        "learner.batch_size": 32,
        "learner.train_period": 8.0,
        "evaluation": {"every": 10**9, "episodes": 2, "envs": 2, "test_episodes": 2, "target": None},
        "checkpoint.every": 10**9,
        "balance": "off",
    }
    return with_changes(preset("cartpole"), changes)


@dataclass(frozen=True)
class Cost:
    """What one run took."""

    steps_per_s: float
    cpu_ms: float
    """CPU time of a thousand steps."""
    around_s: float
    """Seconds before and after training."""


def cpu_seconds() -> dict[int, float]:
    """Return the CPU time that this process and all it has started have used, by process."""
    used = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used[process.pid] = times.user + times.system
    return used


def measure(placement: str, actors: int, env_steps: int) -> Cost:
    """Train once."""
    seen: list[tuple[int, dict[int, float]]] = []

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if metrics["env_steps"] > env_steps / 2:
            seen[1:] = [(metrics["env_steps"], cpu_seconds())]

    with tempfile.TemporaryDirectory() as folder:
        began, run = time.monotonic(), experiment(placement, actors, env_steps)
        summary = api.train(run, seed=100, run_dir=Path(folder) / "run", callbacks=Callbacks(on_step=on_step)).summary
        around_s = time.monotonic() - began - summary["wall_s"]
    (first, before), (last, after) = seen
    used = sum(seconds - before[pid] for pid, seconds in after.items() if pid in before)
    return Cost(summary["env_steps_per_s"], 1e6 * used / (last - first), around_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--env-steps", type=int, default=30_000)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2])
    wanted = parser.parse_args()
    start_local()
    print("| actors | processes, steps/s | ray, steps/s | ratio, median [range] | CPU ms of 1,000 | ray starts in s |")
    print("|---|---|---|---|---|---|")
    for actors in wanted.actors:
        pairs = [
            [measure(placement, actors, wanted.env_steps) for placement in ("processes", "ray")]
            for _ in range(wanted.rounds)
        ]
        ratios = [ray.steps_per_s / processes.steps_per_s for processes, ray in pairs]
        speeds = [f"{statistics.median(pair[side].steps_per_s for pair in pairs):,.0f}" for side in (0, 1)]
        cpu = [f"{statistics.median(pair[side].cpu_ms for pair in pairs):.0f}" for side in (0, 1)]
        spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        started = statistics.median(ray.around_s for _, ray in pairs)
        print(f"| {actors} | {' | '.join(speeds)} | {spread} | {' and '.join(cpu)} | {started:.1f} |", flush=True)
    stop_local()


if __name__ == "__main__":
    main()
