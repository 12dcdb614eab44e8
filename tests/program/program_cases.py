"""Short runs for tests of whole programs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import qfleet.api as api
from qfleet.control.monitor import Callbacks
from qfleet.core import codec
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.replay.chunks import rows_of
from qfleet.runtime import checkpoint

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
    """Hashes of the kept model and of every role's state in the last checkpoint, however its rows are divided.

    How many lives the roles had ("away") is no part of them.
    """
    last = checkpoint.complete(run.dir / "checkpoints")[-1]
    names = sorted({path.stem for path in last.glob("*.msgpack")} - {"away"})
    states = {f"{last.name[:12]}/{name}": digest(checkpoint.read_state(last, name)) for name in names}
    return {"model": hashlib.sha256((run.dir / "model" / "model.safetensors").read_bytes()).hexdigest(), **states}


def states(run: api.Run) -> dict[str, str]:
    """Hashes of the kept model and of the roles' last states; each placement has its own way to save edges."""
    return {name: value for name, value in fingerprint(run).items() if ".ends" not in name and "/edges" not in name}


def digest(state: Any) -> str:
    """Return a hash of a saved state; equal states have equal ones, to the bit."""
    header, arrays = codec.pack(_undivided(state))
    return hashlib.sha256(header + b"".join(repr(a.shape).encode() + a.tobytes() for a in arrays)).hexdigest()


def _undivided(state: Any) -> Any:
    """Return a state with a hash of each row in place of chunks."""
    if isinstance(state, list):
        return [_undivided(part) for part in state]
    if not isinstance(state, dict):
        return state
    if "chunks" not in state:
        return {name: _undivided(part) for name, part in state.items()}
    if "spans" in state:
        return _whole_grid(state)
    rows: dict[int, str] = {}
    home = np.repeat(*state["home"])
    for number, chunk in enumerate(state["chunks"]):
        content = chunk.read()
        for row, data in zip(rows_of(content["rows"]).tolist(), _row_bytes(content), strict=True):
            if home[row] == number:
                rows[row] = hashlib.sha256(data).hexdigest()
    return {"layout": state["layout"], "rows": [[row, rows[row]] for row in sorted(rows)]}


def _whole_grid(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a fused loop's replay with a hash of each tick in place of chunks and the last ticks."""
    length, ticks = state["layout"][0], int(state["positions"][0])
    parts = [
        (first, chunk.read()["columns"]) for (first, _), chunk in zip(state["spans"], state["chunks"], strict=True)
    ]
    parts.append((parts[-1][0] + len(parts[-1][1]["stamp"]) if parts else 0, state["columns"]))
    hashes = {
        first + number: hashlib.sha256(b"".join(row.numpy().tobytes() for row in tick)).hexdigest()
        for first, columns in parts
        for number, tick in enumerate(zip(*columns.values(), strict=True))
    }
    small = {name: part for name, part in state.items() if name not in ("spans", "chunks", "columns")}
    return {**small, "rows": [[tick, hashes[tick]] for tick in range(max(ticks - length, 0), ticks)]}


def _row_bytes(content: dict[str, Any]) -> Iterator[bytes]:
    """Yield all that a chunk has of each of its rows."""
    columns = [*content["columns"].values()]
    for values in content["observations"].values():
        if isinstance(values, dict):
            values = np.split(values["blocks"], np.cumsum(values["lengths"])[:-1])
        columns.append(values)
    for row in zip(*columns, strict=True):
        yield b"".join(value.tobytes() for value in row)
