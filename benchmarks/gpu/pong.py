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
import psutil
import yaml
from ale_py.vector_env import AtariVectorEnv

import qfleet.api as api
from qfleet.control.monitor import Callbacks
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset

SCORE = 18.0
SETTINGS: dict[str, Any] = {
    "placement": "processes",
    "actors": 4,
    "actor.envs": 64,
    "actor.groups": 2,
    "actor.unroll": 2,
    "env.threads": 6,
    "inference.kind": "served",
    "inference.device": "cuda",
    "inference.deadline_ms": 0.5,
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
    """Return the steps a second of ale-py's games alone, as many as all actors play together."""
    games = experiment.actors * experiment.actor.envs
    env = AtariVectorEnv("pong", games, num_threads=0, repeat_action_probability=0.25, noop_max=0)
    env.reset()
    rng, ticks, began = np.random.default_rng(0), 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        env.step(rng.integers(env.single_action_space.n, size=games))
        ticks += 1
    rate = ticks * games / (time.perf_counter() - began)
    env.close()
    return rate


def train(experiment: Experiment, seed: int, limit: float) -> dict[str, Any]:
    """Train until the score or the limit; return the rates from the first update on, and the evaluations."""
    began, curve = time.perf_counter(), []

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if time.perf_counter() - began > limit:
            stop()

    def on_evaluation(metrics: dict[str, Any], stop: Any) -> None:
        curve.append((round(time.perf_counter() - began, 1), metrics["env_steps"], round(metrics["mean"], 1)))

    with tempfile.TemporaryDirectory() as folder:
        run = api.train(
            experiment, seed=seed, run_dir=Path(folder) / "run",
            callbacks=Callbacks(on_step=on_step, on_evaluation=on_evaluation),
        )  # fmt: skip
        records = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (run.dir / "events.jsonl").read_text().splitlines()]
    said = sorted({event["text"] for event in events if event["event"] == "notice"})
    return {"notices": said, **rates(records), "samples_per_insert": run.summary["samples_per_insert"], "curve": curve}


def rates(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return steps and updates a second between the first and the last record with updates, and who was busy then."""
    learning = [record for record in records if record["updates"] > 0]
    first, last = learning[0], learning[-1]
    seconds = last["wall_s"] - first["wall_s"]
    found: dict[str, Any] = {"seconds_to_first_update": first["wall_s"], "seconds": seconds}
    for name in ("env_steps", "updates"):
        found[f"{name}_per_s"] = (last[name] - first[name]) / seconds
    for name in last:
        if name.endswith(".busy") or name in ("inference_batch", "inference_wait_ms", "policy_lag"):
            found[name] = float(np.mean([record[name] for record in learning if name in record]))
    return {**found, "bottleneck": last.get("bottleneck", "")}


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
        psutil.cpu_percent()
        result = train(experiment, seed, options.limit)
        result |= {"cores_busy": psutil.cpu_percent() / 100, "share_of_raw": result["env_steps_per_s"] / raw}
        print(json.dumps({"seed": seed, **given, **result}), flush=True)


if __name__ == "__main__":
    main()
