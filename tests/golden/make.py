"""Writes the golden files of the present formats: run it when a format gets a new version, and keep the old files.

python tests/golden/make.py NAME pipeline|fused
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np

import qfleet
from qfleet.experiment import with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.runtime import checkpoint

HERE = Path(__file__).parent
OBSERVATIONS = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)


def main(name: str, topology: str) -> None:
    """Train for a moment and keep configuration, model, last checkpoint, and what the model answers."""
    small = {
        "topology": topology,
        "env_steps": 400,
        "network.hidden": [8],
        "agent.head.atoms": 5,
        "replay.capacity": 300,
        "learner.learning_starts": 100,
        "learner.batch_size": 8,
        "actor.envs": 2,
        "evaluation": {"episodes": 2, "envs": 2, "test_episodes": 2, "target": None},
    }
    run = qfleet.train(with_changes(apply(preset("cartpole"), "rainbow"), small), seed=7, run_dir=HERE / name)
    (run.dir / "answers.json").write_text(json.dumps(qfleet.load(run.dir).q(OBSERVATIONS).tolist()))
    for path in run.dir.iterdir():
        if path.name in ("metrics.jsonl", "events.jsonl", "summary.json", ".lock", ".request"):
            path.unlink()
    shutil.rmtree(run.dir / ".scale")
    for old in checkpoint.complete(run.dir / "checkpoints")[:-1]:
        shutil.rmtree(old)


if __name__ == "__main__":
    main(*sys.argv[1:])
