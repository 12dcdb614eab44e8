"""Ten million frames as Dopamine plays them: several games at a time, training returns by a quarter of a million steps.

    python benchmarks/gpu/dopamine.py pong:101 breakout:101 space_invaders:101 [--env-steps 2500000] [--limit 1800]
        [--at-once 3] [--json FILE] [--section.field VALUE ...]

Each GAME:SEED is a run of its own (`qfleet train atari:GAME` with the recipe below), several at the same time on one
machine; when one ends, the next begins. A run is killed when it has its steps: the gigabytes of its last checkpoint
are of no use here. A training return is the mean over the games that ended within so many steps, as in Dopamine's
iterations; one that ended there began earlier by as many steps as all games of the run made meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ITERATION = 250_000
"""Steps between two figures of a curve: an iteration of Dopamine's is a million frames."""
RECIPE: dict[str, Any] = {
    "network.padding": "same",
    "accel.precision": "tf32",
    "optim.lr": 1e-4,
    "learner.updates-per-draw": 16,
    "placement": "processes",
    "actors": 2,
    "actor.envs": 12,
    "actor.groups": 3,
    "actor.unroll": 4,
    "env.threads": 4,
    "inference.kind": "served",
    "inference.device": "cuda",
    "inference.deadline-ms": 0.5,
    "replay.storage.kind": "ram",
    "checkpoint.every": 10**9,
    "checkpoint.every-s": 1e6,
    "checkpoint.unsaved-mb": 1e9,
    "evaluation.every": 10**8,
}
"""The preset `atari` with the other's convolutions in tf32, a rate of 1e-4 where the other has 6.25e-5, and a third of
sixteen cores. No evaluation: what is compared is what is earned in training."""


class Training:
    """One run in a process of its own."""

    def __init__(self, game: str, seed: int, settings: dict[str, Any], folder: Path) -> None:
        self.game, self.seed, self.folder = game, seed, folder / f"{game}-{seed}"
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "qfleet", "train", f"atari:{game}", "--seed", str(seed), "--quiet", *flags]
        self._output = (folder / f"{game}-{seed}.txt").open("w")
        self._process = subprocess.Popen(
            [*command, "--run-dir", str(self.folder)], stdout=self._output, stderr=self._output, start_new_session=True
        )
        self._killed = False

    def running(self) -> bool:
        """Return whether it still trains."""
        return self._process.poll() is None

    def said(self) -> str:
        """Return the end of what it printed."""
        return Path(self._output.name).read_text()[-2000:]

    def stands(self) -> str:
        """Return how far it is, and its newest returns, in words."""
        return f"{self.game}:{self.seed} {[(steps, mean) for steps, mean, _ in curve(self.records())[-3:]]}"

    def over(self, env_steps: int) -> bool:
        """Return whether it has its steps, and ends it then, or whether it ended by itself."""
        records = self.records()
        if records and records[-1]["env_steps"] >= env_steps:
            self.kill()
        elif not self.running():
            print(f"{self.game}: {self.said()}", flush=True)
        return not self.running()

    def kill(self) -> None:
        """End it and all its processes, as it is."""
        if self.running():
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._killed = True

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of its metrics that are there so far."""
        return _lines(self.folder / "metrics.jsonl")

    def result(self) -> dict[str, Any]:
        """Return its curve and its rates."""
        records, events = self.records(), _lines(self.folder / "events.jsonl")
        learning = [record for record in records if record["updates"] > 0]
        found: dict[str, Any] = {"game": self.game, "seed": self.seed, "killed": self._killed, "curve": curve(records)}
        found["computed"] = [e["text"] for e in events if e["event"] == "notice" and "kernels" in e.get("text", "")]
        found["evaluations"] = [(e["env_steps"], e["mean"]) for e in events if e["event"] == "evaluation"]
        if len(learning) > 1:
            first, last = learning[0], learning[-1]
            seconds = last["wall_s"] - first["wall_s"]
            found |= {"env_steps": last["env_steps"], "updates": last["updates"], "wall_s": last["wall_s"]}
            found["env_steps_per_s"] = (last["env_steps"] - first["env_steps"]) / seconds
            found["busy"] = {name: value for name, value in last.items() if name.endswith(".busy")}
            found["policy_lag"] = last.get("policy_lag")
        return found


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file that may be written to meanwhile, and may not be there yet."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def curve(records: list[dict[str, Any]]) -> list[tuple[int, float, int]]:
    """Return for each iteration its last step, the mean return of the games that ended in it, and their number.

    The last iteration may be one that was cut.
    """
    edges = [{"env_steps": 0, "episodes": 0, "return_sum": 0.0}]
    for record in records:
        if record["env_steps"] >= len(edges) * ITERATION or record is records[-1]:
            edges.append(record)
    means = []
    for before, after in pairwise(edges):
        games = after["episodes"] - before["episodes"]
        total = after.get("return_sum", 0.0) - before.get("return_sum", 0.0)
        means.append((after["env_steps"], round(total / max(games, 1), 2), int(games)))
    return means


def train(
    jobs: list[str], settings: dict[str, Any], env_steps: int, limit: float, at_once: int
) -> Iterator[dict[str, Any]]:
    """Train jobs until each has its steps, or all of them have had their time; yields each result when it is there."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        waiting, running, told = list(jobs), list[Training](), 0.0
        while (waiting or running) and time.perf_counter() - began < limit:
            while waiting and len(running) < at_once:
                game, seed = waiting.pop(0).split(":")
                own = {**settings, "env-steps": env_steps + ITERATION}
                running.append(Training(game, int(seed), own, Path(folder)))
            time.sleep(0.5)
            for run in [run for run in running if run.over(env_steps)]:
                running.remove(run)
                yield run.result()
            if time.perf_counter() - told > 60:
                told = time.perf_counter()
                print(
                    f"{told - began:.0f} s, load {os.getloadavg()[0]:.0f}: {[run.stands() for run in running]}",
                    flush=True,
                )
        for run in running:
            run.kill()
            yield run.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="GAME:SEED")
    parser.add_argument("--env-steps", type=int, default=2_500_000)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for all")
    parser.add_argument("--at-once", type=int, default=3, help="runs at the same time")
    parser.add_argument("--json", type=Path, help="a file to which a line for each run is added")
    options, rest = parser.parse_known_args()
    given = {name.removeprefix("--"): value for name, value in zip(rest[::2], rest[1::2], strict=True)}
    settings = {**RECIPE, **given}
    for result in train(options.jobs, settings, options.env_steps, options.limit, options.at_once):
        line = json.dumps({**result, "beside": min(options.at_once, len(options.jobs)) - 1, **given})
        print(line, flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
