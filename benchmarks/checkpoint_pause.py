"""Measures how long checkpoints hold training up, and how many bytes they write.

    python benchmarks/checkpoint_pause.py [--checkpoints 30] [--placements inline processes]

DQN on CartPole, with room for a million transitions in its replay, saves every few thousand steps. "pause" is the time
during which no role may step, by the clock, and (inline) by the processor: what is left of it on a slow or busy disk.
Bytes are those of new files: rows in chunks, their parity, and the states of roles, which are written whole.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from qfleet import api
from qfleet.control.monitor import Callbacks, Monitor
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset


def experiment(placement: str, every: int, checkpoints: int) -> Experiment:
    return with_changes(
        preset("cartpole"),
        {
            "env": {"kind": "gym", "id": "CartPole-v1", "reward_scale": 0.005},
            "env_steps": every * checkpoints,
            "placement": placement,
            "actors": 1,
            "actor.envs": 16,
            "replay.capacity": 1_000_000,
            "evaluation": {"every": 10**9, "episodes": 1, "envs": 1, "test_episodes": 1, "target": None},
            "learner.train_period": 16.0,
            "checkpoint.every": every,
        },
    )


class Watched:
    """Times every checkpoint of a run, and weighs what it wrote."""

    def __init__(self, profile: bool) -> None:
        self.pauses: list[float] = []
        self.computing: list[float] = []
        self.written: list[dict[str, int]] = []
        self.profile = cProfile.Profile() if profile else None
        self._seen: dict[Path, float] = {}

    def around(self, save: Any) -> Any:
        def timed(monitor: Monitor) -> Path:
            began, computed = time.perf_counter(), time.process_time()
            if self.profile is not None:
                self.profile.enable()
            path: Path = save(monitor)
            if self.profile is not None:
                self.profile.disable()
            self.pauses.append(time.perf_counter() - began)
            self.computing.append(time.process_time() - computed)
            self.written.append(self._new_bytes(path.parent))
            return path

        return timed

    def _new_bytes(self, root: Path) -> dict[str, int]:
        """Return the bytes of the files that are new: of chunks, parity and states."""
        files = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
        new = {"chunks": 0, "parity": 0, "states": 0}
        for path, made in files.items():
            if self._seen.get(path) != made:
                kind = "states" if path.parent.name != "chunks" else "parity" if path.suffix == ".parity" else "chunks"
                new[kind] += path.stat().st_size
        self._seen = files
        return new


def measure(placement: str, checkpoints: int, every: int, profile: bool) -> Watched:
    watched, save = Watched(profile), Monitor._save
    Monitor._save = watched.around(save)  # type: ignore[method-assign]
    try:
        with TemporaryDirectory() as directory:
            api.train(experiment(placement, every, checkpoints), run_dir=Path(directory) / "run", callbacks=Callbacks())
    finally:
        Monitor._save = save  # type: ignore[method-assign]
    return watched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=30)
    parser.add_argument("--every", type=int, default=20_000)
    parser.add_argument("--placements", nargs="+", default=["inline", "processes"])
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    print("| placement | checkpoints | pause, ms: median | p99 | computing, ms | kB: chunks | parity | states |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for placement in arguments.placements:
        watched = measure(placement, arguments.checkpoints, arguments.every, arguments.profile)
        pauses = 1000 * np.array(watched.pauses[1:])
        times = [np.median(pauses), np.percentile(pauses, 99), 1000 * np.median(watched.computing[1:])]
        sizes = [np.median([new[kind] for new in watched.written[1:]]) / 1e3 for kind in watched.written[0]]
        print(
            f"| {placement} | {len(pauses)} | {' | '.join(f'{value:.0f}' for value in [*times, *sizes])} |", flush=True
        )
        if watched.profile is not None:
            pstats.Stats(watched.profile).sort_stats("cumulative").print_stats(25)


if __name__ == "__main__":
    main()
