"""Short runs for tests of whole programs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import qfleet.api as api
from qfleet.control.monitor import Callbacks
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply

GYM = {"cartpole": ("CartPole-v1", 0.005), "catch": ("qfleet/Catch-v0", 1.0)}
"""Presets of tensor-native games, by the same game as an ordinary environment and its reward scale."""


def pipeline(name: str) -> Experiment:
    """A preset with an ordinary Gymnasium environment, which only a pipeline can play."""
    if name not in GYM:
        return preset(name)
    env_id, scale = GYM[name]
    return with_changes(preset(name), {"env.kind": "gym", "env.id": env_id, "env.reward_scale": scale})


def short(algo: str = "dqn", name: str = "cartpole", env_steps: int = 1200, **changes: Any) -> Experiment:
    """A pipeline cut down to seconds."""
    small = {
        "env_steps": env_steps,
        "evaluation": {"every": 500, "episodes": 2, "envs": 2, "test_episodes": 2, "target": None},
        "learner.learning_starts": 200,
        "learner.batch_size": 32,
        "learner.train_period": 4.0,
        "checkpoint.every": 450,
    }
    if algo == "r2d2":
        small |= {"agent.memory": {"hidden": 16, "length": 8, "burn_in": 4, "period": 4}}
        small |= {"learner.batch_size": 8, "learner.train_period": 16.0}
    return with_changes(apply(pipeline(name), algo), {**small, **changes})


def stop_at(env_steps: int) -> Callbacks:
    """Callbacks that end a run at its first step at or beyond `env_steps`."""

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if metrics["env_steps"] >= env_steps:
            stop()

    return Callbacks(on_step=on_step)


def fingerprint(run: api.Run) -> dict[str, str]:
    """Hashes of the kept model and of every file of the last checkpoint."""
    last = sorted((run.dir / "checkpoints").iterdir())[-1]
    files = [
        run.dir / "model" / "model.safetensors",
        *sorted(last.glob("*.safetensors")),
        *sorted(last.glob("*.msgpack")),
    ]
    return {f"{path.parent.name[:12]}/{path.name}": _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
