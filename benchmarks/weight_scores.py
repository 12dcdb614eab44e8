"""Compares what is learned when actors follow packed weights: CartPole in a pipeline inline, equal seeds for each form.

    python benchmarks/weight_scores.py [--seeds 5] [--first-seed 100] [--env-steps 20000] [--kinds none delta]

Weights are published after every update or two there, at a high learning rate. `way` is the mean over all evaluations
of a run, which tells how fast it learned; `test` the score of the kept model on unseen seeds. Both are means over
seeds with their 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from qfleet import api
from qfleet.core.statistics import mean_ci95
from qfleet.experiment import with_changes
from qfleet.presets import preset

KINDS = ("none", "bf16", "int8", "delta")


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(kind: str, seed: int, env_steps: int, directory: Path) -> tuple[float, float, float]:
    """Return the mean over all evaluations, the final test, and bytes a publication."""
    experiment = with_changes(
        preset("cartpole"),
        {
            "env": {"kind": "gym", "id": "CartPole-v1", "reward_scale": 0.005},
            "env_steps": env_steps,
            "evaluation.target": None,
            "learner.weights.kind": kind,
        },
    )
    run = api.train(experiment, seed=seed, run_dir=directory / f"{kind}-{seed}")
    scores = [record["mean"] for record in lines(run.dir / "events.jsonl") if record["event"] == "evaluation"]
    last = lines(run.dir / "metrics.jsonl")[-1]
    return float(np.mean(scores)), run.summary["eval"]["mean"], last["weight_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--env-steps", type=int, default=20_000)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    arguments = parser.parse_args()
    print("| form | bytes | way | test | way of each seed |\n|---|---|---|---|---|", flush=True)
    with TemporaryDirectory() as folder:
        for kind in arguments.kinds:
            found = np.array(
                [
                    measure(kind, arguments.first_seed + number, arguments.env_steps, Path(folder))
                    for number in range(arguments.seeds)
                ]
            )
            way, test = (mean_ci95(found[:, column], np.random.default_rng(0)) for column in (0, 1))
            shown = [f"{one.value:.1f} [{one.low:.1f}, {one.high:.1f}]" for one in (way, test)]
            each = ", ".join(f"{value:.0f}" for value in found[:, 0])
            print(f"| {kind} | {found[:, 2].mean():.0f} | {shown[0]} | {shown[1]} | {each} |", flush=True)


if __name__ == "__main__":
    main()
