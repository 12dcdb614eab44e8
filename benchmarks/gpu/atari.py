"""Atari games on one machine with a GPU: training's steps a second, alone or beside the emulator's, curve and scores.

    python benchmarks/gpu/atari.py GAME [--seeds 1 2 3] [--limit 240] [--target 18] [--beside 128]
        [--section.field VALUE ...]

`--beside` plays so many games with ale-py's vector alone, on all cores and with random actions, in turns with training,
whose processes are stopped meanwhile: machines that others use too change their pace from minute to minute. Training's
share is the median of what each of its stretches made of the two raw ones around it. The preset is `atari-fast`; the
DQN that Dopamine publishes curves of is in `dopamine.py`. `train_return` is the mean of the training episodes that
ended last.
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
from qfleet.experiment import with_changes
from qfleet.presets import preset

MACHINE: dict[str, Any] = {
    "placement": "processes",
    "actors": 6,
    "actor.envs": 48,
    "actor.groups": 3,
    "actor.unroll": 4,
    "env.threads": 3,
    "inference.kind": "served",
    "inference.device": "cuda",
    "inference.deadline_ms": 0.5,
    "replay.storage.kind": "ram",
    "checkpoint.every": 100_000_000,
    "checkpoint.every_s": 1e6,
    "checkpoint.unsaved_mb": 1e9,
    "evaluation": {"every": 250_000, "episodes": 10, "envs": 10, "test_episodes": 10, "in_a_row": 1, "epsilon": 0.001},
}
TRAINED_S, RAW_S = 6.0, 2.0
"""Seconds of each turn."""
WARM = 40_000
"""Steps before the first turn."""


class RawGames:
    """Ale-py's games alone."""

    def __init__(self, game: str, games: int) -> None:
        self._env = AtariVectorEnv(game, games, num_threads=0, repeat_action_probability=0.25, noop_max=0)
        self._env.reset()
        self._rng = np.random.default_rng(0)

    def rate(self, seconds: float) -> float:
        """Return their steps a second."""
        ticks, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            self._env.step(self._rng.integers(self._env.single_action_space.n, size=self._env.num_envs))
            ticks += 1
        return ticks * self._env.num_envs / (time.perf_counter() - began)


class InTurns:
    """Training and raw games in turns, once training has made so many steps."""

    def __init__(self, games: RawGames, begins: int) -> None:
        self._games, self._begins = games, begins
        self._since: tuple[float, int] | None = None
        self.trained: list[float] = []
        self.raw: list[float] = []

    def look(self, steps: int) -> None:
        """Be told how many steps training has made; stop it for the raw games when it is their turn."""
        if steps < self._begins:
            return
        if self._since is not None:
            seconds = time.perf_counter() - self._since[0]
            if seconds < TRAINED_S:
                return
            self.trained.append((steps - self._since[1]) / seconds)
        roles = psutil.Process().children(recursive=True)
        for role in roles:
            role.suspend()
        self.raw.append(self._games.rate(RAW_S))
        for role in roles:
            role.resume()
        self._since = time.perf_counter(), steps

    def shares(self) -> list[float]:
        """Return what share of the raw rates around it each stretch of training had."""
        around = zip(self.raw, self.raw[1:], strict=False)
        return [own / ((before + after) / 2) for own, (before, after) in zip(self.trained, around, strict=True)]


def train(game: str, settings: dict[str, Any], seed: int, limit: float, turns: InTurns | None) -> dict[str, Any]:
    """Train until the target or the limit; return rates, who was busy, the evaluations and the training's returns.

    An evaluation is when it was told, in seconds from the start, its model's steps, the mean, and the seconds it took.
    """
    began, curve, started = time.perf_counter(), [], []

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        started.append(time.perf_counter() - began)
        if turns is not None:
            turns.look(metrics["env_steps"])
        if time.perf_counter() - began > limit:
            stop()

    def on_evaluation(metrics: dict[str, Any], stop: Any) -> None:
        told, took = time.perf_counter() - began, metrics["seconds"]
        curve.append((round(told, 1), metrics["env_steps"], round(metrics["mean"], 1), round(took, 1)))

    with tempfile.TemporaryDirectory() as folder:
        run = api.train(
            with_changes(preset(f"atari-fast:{game}"), settings), seed=seed, run_dir=Path(folder) / "run",
            callbacks=Callbacks(on_step=on_step, on_evaluation=on_evaluation),
        )  # fmt: skip
        records = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (run.dir / "events.jsonl").read_text().splitlines()]
    said = sorted({event["text"] for event in events if event["event"] == "notice"})
    returns = [(r["env_steps"], round(r["episode_return"], 1)) for r in records if "episode_return" in r]
    return {
        "notices": said,
        "seconds_to_start": started[0],
        **rates(records),
        "samples_per_insert": run.summary["samples_per_insert"],
        "test": run.summary.get("test"),
        "curve": curve,
        "train_return": returns[:: max(len(returns) // 12, 1)] + returns[-1:],
    }


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
            found[name] = round(float(np.mean([record[name] for record in learning if name in record])), 3)
    return {**found, "bottleneck": last.get("bottleneck", "")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--limit", type=float, default=240.0)
    parser.add_argument("--target", type=float)
    parser.add_argument("--beside", type=int, metavar="GAMES")
    options, rest = parser.parse_known_args()
    given = {name.removeprefix("--"): yaml.safe_load(value) for name, value in zip(rest[::2], rest[1::2], strict=True)}
    settings = {**MACHINE, "evaluation.target": options.target, **given}
    games = RawGames(options.game, options.beside) if options.beside else None
    for seed in options.seeds:
        turns = InTurns(games, WARM) if games else None
        psutil.cpu_percent()
        result = train(options.game, settings, seed, options.limit, turns)
        result |= {"cores": os.cpu_count(), "cores_busy": psutil.cpu_percent() / 100}
        if turns:
            result |= {"raw": turns.raw, "trained": turns.trained, "share_of_raw": float(np.median(turns.shares()))}
        print(json.dumps({"game": options.game, "seed": seed, **given, **result}), flush=True)


if __name__ == "__main__":
    main()
