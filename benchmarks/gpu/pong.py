"""Pong on one machine with a GPU: raw steps a second of the emulator, then those of training, and seconds to 18.

    python benchmarks/gpu/pong.py [--seeds 1 2 3] [--limit 240] [--raw-seconds 8] [--section.field VALUE ...]

Both rates come from the same process, one after the other: the raw one is ale-py's vector of as many games as all
actors have together, on all cores, with random actions and nothing else. Training's is taken from the first update on.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import qfleet.api as api
from qfleet.control.monitor import Callbacks
from qfleet.envs import AtariConfig, make_env
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset

SCORE = 18.0
SETTINGS: dict[str, Any] = {
    "placement": "processes",
    "actors": 4,
    "actor.envs": 64,
    "actor.groups": 2,
    "actor.unroll": 2,
    "env.threads": 4,
    "inference.kind": "served",
    "inference.device": "cuda",
    "replay.capacity": 500_000,
    "replay.storage.kind": "ram",
    "agent.n_step": 3,
    "agent.double": True,
    "agent.target": {"kind": "hard", "period": 500},
    "learner.batch_size": 512,
    "learner.train_period": 64.0,
    "learner.learning_starts": 20_000,
    "optim.lr": 3e-4,
    "exploration.steps": 200_000,
    "env_steps": 6_000_000,
    "evaluation": {"every": 200_000, "episodes": 10, "envs": 10, "test_episodes": 10, "target": SCORE},
    "checkpoint.every": 6_000_000,
}


def raw_rate(experiment: Experiment, seconds: float) -> float:
    """Return the steps a second of the games alone."""
    games = experiment.actors * experiment.actor.envs
    assert isinstance(experiment.env, AtariConfig)
    env = make_env(experiment.env.replace(threads=os.cpu_count() or 1), games)
    env.reset(list(range(games)))
    rng, ticks, began = np.random.default_rng(0), 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        env.step(rng.integers(env.spec.actions, size=games))
        ticks += 1
    rate = ticks * games / (time.perf_counter() - began)
    env.close()
    return rate


def train(experiment: Experiment, seed: int, limit: float) -> dict[str, Any]:
    """Train until the score or the limit; return the rate from the first update on, and the evaluations."""
    began, curve, marks = time.perf_counter(), [], []

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        now = time.perf_counter() - began
        if metrics["updates"] > 0:
            marks.append((now, metrics["env_steps"], metrics["updates"]))
        if now > limit:
            stop()

    def on_evaluation(metrics: dict[str, Any], stop: Any) -> None:
        curve.append((round(time.perf_counter() - began, 1), metrics["env_steps"], round(metrics["mean"], 1)))
        if metrics["mean"] >= SCORE:
            stop()

    with tempfile.TemporaryDirectory() as folder:
        run = api.train(
            experiment, seed=seed, run_dir=Path(folder) / "run",
            callbacks=Callbacks(on_step=on_step, on_evaluation=on_evaluation),
        )  # fmt: skip
    (t0, s0, u0), (t1, s1, u1) = marks[0], marks[-1]
    return {
        "steps_per_s": (s1 - s0) / (t1 - t0),
        "updates_per_s": (u1 - u0) / (t1 - t0),
        "samples_per_insert": run.summary["samples_per_insert"],
        "seconds_to_first_update": t0,
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--limit", type=float, default=240.0)
    parser.add_argument("--raw-seconds", type=float, default=8.0)
    options, rest = parser.parse_known_args()
    given = {name.removeprefix("--"): yaml.safe_load(value) for name, value in zip(rest[::2], rest[1::2], strict=True)}
    experiment = with_changes(preset("atari:pong"), {**SETTINGS, **given})
    raw = raw_rate(experiment, options.raw_seconds)
    print(json.dumps({"raw_steps_per_s": round(raw), "cores": os.cpu_count()}), flush=True)
    for seed in options.seeds:
        result = train(experiment, seed, options.limit)
        print(json.dumps({"seed": seed, **given, **result, "share_of_raw": result["steps_per_s"] / raw}), flush=True)


if __name__ == "__main__":
    main()
