"""Cuts runs at random steps, resumes them, and compares the last checkpoint with that of a run never cut, to the bit.

    python benchmarks/cut_points.py [--points 300] [--results FILE]

Three algorithms, three environments; inline, and in processes and on Ray in lock-step. Half of the cuts are asked for,
and leave a checkpoint of that very step; the others are kills of the whole run, which goes on from the last checkpoint
before. Each point is what its number says. Points that the file of results has are not run again, so that a series that
was cut goes on; prints a table of all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "program"))

import numpy as np
from program_cases import fingerprint, short, stop_at

from qfleet import api
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import QfleetError
from qfleet.experiment import Experiment
from qfleet.runtime.ray_cluster import start_local

ALGORITHMS, ENVIRONMENTS, PLACEMENTS = (
    ("rainbow", "r2d2", "pqn"),
    ("cartpole", "catch", "atari:pong"),
    (
        {"placement": "inline"},
        {"placement": "processes", "lockstep": True},
        {"placement": "ray", "lockstep": True},
    ),
)
STEPS, EVERY = 400, 130
"""Environment steps of a run, and between two checkpoints."""
SEED = 5
PONG = {"env.reseed_every": 100, "learner.batch_size": 4}


@dataclass(frozen=True)
class Point:
    """Where one run is cut, and how."""

    number: int

    @property
    def algorithm(self) -> str:
        return ALGORITHMS[self.number % 3]

    @property
    def environment(self) -> str:
        return ENVIRONMENTS[self.number // 3 % 3]

    @property
    def placement(self) -> dict[str, Any]:
        return PLACEMENTS[self.number // 9 % 3]

    @property
    def killed(self) -> bool:
        return self.number // 27 % 2 == 1

    @property
    def step(self) -> int:
        """The step at which it is cut; a run that is killed must have a checkpoint to go back to."""
        rng = np.random.default_rng(self.number)
        return int(rng.integers(EVERY + 40 if self.killed else 1, STEPS))


def experiment(algorithm: str, environment: str, placement: str) -> Experiment:
    """Return a run of seconds."""
    small: dict[str, Any] = {
        "actors": 2,
        "actor.envs": 2,
        "learner.learning_starts": 100,
        "learner.batch_size": 8,
        "learner.train_period": 24.0 if algorithm == "r2d2" else 16.0,
        "evaluation.every": 150,
        "evaluation.max_episode_steps": 40,
        "checkpoint.every": EVERY,
        "checkpoint.keep": 2,
    }
    if environment == "atari:pong":
        small |= PONG if algorithm == "pqn" else {**PONG, "replay.capacity": 2000}
    where = next(one for one in PLACEMENTS if one["placement"] == placement)
    return short(algorithm, environment, STEPS, **small, **where)


@cache
def uncut(algorithm: str, environment: str, placement: str) -> dict[str, str]:
    """Return the hashes of a run that is never cut."""
    return fingerprint(
        api.train(experiment(algorithm, environment, placement), seed=SEED, run_dir=Path(mkdtemp()) / "run")
    )


def cut(point: Point, directory: Path) -> None:
    """Begin a run and end it at its point."""
    if point.killed:
        command = [sys.executable, __file__, "--kill", str(point.number), "--run-dir", str(directory)]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        assert ended.returncode == -signal.SIGKILL, f"it was to be killed: {ended.stderr[-500:]}"
        return
    own = experiment(point.algorithm, point.environment, point.placement["placement"])
    api.train(own, seed=SEED, run_dir=directory, callbacks=stop_at(point.step))


def kill_at(point: Point, directory: Path) -> None:
    """Run until the point and kill this process there; runs in a process of its own."""

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if metrics["env_steps"] >= point.step:
            os.kill(os.getpid(), signal.SIGKILL)

    own = experiment(point.algorithm, point.environment, point.placement["placement"])
    api.train(own, seed=SEED, run_dir=directory, callbacks=Callbacks(on_step=on_step))


def tried(point: Point) -> dict[str, Any]:
    """Cut and resume one run; returns what came of it, with the names of what differs."""
    began, placement = time.monotonic(), point.placement["placement"]
    found = {"number": point.number, "algorithm": point.algorithm, "environment": point.environment}
    found |= {"placement": placement, "killed": point.killed, "step": point.step}
    with TemporaryDirectory() as folder:
        try:
            cut(point, Path(folder) / "run")
            resumed = fingerprint(api.resume(Path(folder) / "run"))
            expected = uncut(point.algorithm, point.environment, placement)
            differ = sorted(name for name in {*resumed, *expected} if resumed.get(name) != expected.get(name))
            failed = f"differ: {', '.join(differ)}" if differ else ""
        except (QfleetError, AssertionError, OSError) as error:
            failed = f"{type(error).__name__}: {error}"
    return found | {"failed": failed, "seconds": round(time.monotonic() - began, 1)}


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of all points."""
    groups = defaultdict(list)
    for found in results:
        groups[found["algorithm"], found["environment"], found["placement"]].append(found)
    rows = ["| algorithm | environment | placement | stopped | killed | the same bits |", "|---|---|---|---|---|---|"]
    for names, group in sorted(groups.items()):
        killed, good = sum(found["killed"] for found in group), sum(not found["failed"] for found in group)
        rows.append(f"| {' | '.join(names)} | {len(group) - killed} | {killed} | {good} of {len(group)} |")
    good = sum(not found["failed"] for found in results)
    return "\n".join([*rows, "", f"**{good} of {len(results)}** have the bits of a run that was never cut."])


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results of a file, if there is one."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("cut_points.jsonl"))
    parser.add_argument("--kill", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kill is not None:
        kill_at(Point(options.kill), options.run_dir)
        return
    start_local()  # once for all runs here; a run that is killed has one of its own
    known = {found["number"] for found in read(options.results)}
    for number in (number for number in range(options.points) if number not in known):
        found = tried(Point(number))
        with options.results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{number:4d}  {found['seconds']:6.1f} s  {found['failed'] or 'the same bits'}", flush=True)
    results = read(options.results)
    print(table(results))
    if bad := [found["number"] for found in results if found["failed"]]:
        sys.exit(f"failed: points {', '.join(map(str, bad))}")


if __name__ == "__main__":
    main()
