"""Fills the disk under runs that go on, and counts what becomes of them.

    python benchmarks/disk_full.py [--seeds 20] [--sites-only]

First each place that writes meets a full disk once, at a random time (a failpoint: the error that the system would
give). Then, where this process may mount one, a small disk is really filled to its last byte at a random moment, until
two seconds after the alarm. "told after" is the time from the last byte to the notice on the screen.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from qfleet import api
from qfleet.core import failpoints
from qfleet.core.errors import QfleetError
from qfleet.experiment import Experiment, with_changes
from qfleet.observe.sinks import Silent, read_jsonl
from qfleet.presets import preset
from qfleet.runtime import checkpoint

SITES = (
    "checkpoint.state", "checkpoint.before_chunk", "checkpoint.in_chunk", "checkpoint.before_manifest",
    "checkpoint.before_rename", "checkpoint.before_removal", "model.write", "metrics.write", "events.write",
    "tensorboard.write",
)  # fmt: skip
ALARMS = ("unsaved", "unwritten")
COLUMNS = ("went on", "told", "told in events.jsonl", "saved after it", "last one good")
SMALL_DISK = "QFLEET_SMALL_DISK"
"""Names the small disk to the part of this program that has it."""


@dataclass
class Screen(Silent):
    """What a person would see."""

    alarm_at: float | None = None
    saved: list[float] = field(default_factory=list)

    def event(self, record: Any) -> None:
        if record.get("kind") in ALARMS and self.alarm_at is None:
            self.alarm_at = time.monotonic()
        if record.get("event") == "checkpoint":
            self.saved.append(time.monotonic())


def experiment(seed: int, env_steps: int, placement: str, changes: dict[str, Any]) -> Experiment:
    return with_changes(
        preset("cartpole"),
        {
            "env": {"kind": "gym", "id": "CartPole-v1", "reward_scale": 0.005},
            "seed": seed,
            "env_steps": env_steps,
            "placement": placement,
            "actors": 1,
            "evaluation": {"every": 300, "episodes": 1, "envs": 1, "test_episodes": 1, "target": None},
            "evaluation.max_episode_steps": 100,
            "learner.learning_starts": 100,
            "learner.train_period": 8.0,
            **changes,
        },
    )


def outcome(run: Path, screen: Screen, ended: str, since: float) -> set[str]:
    """Return what of COLUMNS is true of a run that met a full disk `since` then and `ended` so."""
    seen = {"went on"} if ended == "budget" else set()
    if screen.alarm_at is not None:
        seen.add("told")
    if any(event.get("kind") in ALARMS for event in read_jsonl(run / "events.jsonl")):
        seen.add("told in events.jsonl")
    if screen.saved and screen.saved[-1] > (screen.alarm_at or since):
        seen.add("saved after it")
    summary = json.loads((run / "summary.json").read_text()) if seen else {"env_steps": None}
    with contextlib.suppress(QfleetError):
        if checkpoint.newest_good(run / "checkpoints").manifest["env_steps"] == summary["env_steps"]:
            seen.add("last one good")
    return seen


def site_case(site: str, seed: int, directory: Path) -> set[str]:
    """Let one place meet a full disk once."""
    count = int(np.random.default_rng(seed).integers(1, 3 if site == "model.write" else 5))
    placement = "processes" if seed % 10 == 9 else "inline"
    who = "supervisor/" if placement == "processes" and not site.endswith(("state", "chunk")) else ""
    os.environ[failpoints.VARIABLE] = f"{who}{site}:full@{count}"
    screen, run, since = Screen(), directory / f"{site}-{seed}", time.monotonic()
    changes = {"track.every_s": 0.02, "checkpoint.every": 150, "track.tensorboard": site == "tensorboard.write"}
    try:
        ended = api.train(experiment(seed, 900, placement, changes), run_dir=run, sinks=[screen])
        stopped_by = ended.summary["stopped_by"]
    except QfleetError as error:
        stopped_by = f"{type(error).__name__}: {error}"
        print(f"{site}, seed {seed}: {stopped_by}", file=sys.stderr)
    finally:
        del os.environ[failpoints.VARIABLE]
    return outcome(run, screen, stopped_by, since)


def full_case(seed: int, placement: str, disk: Path) -> tuple[set[str], float | None]:
    """Fill a disk at a random moment; returns the outcome, and the seconds until that was told."""
    screen, run, rng = Screen(), disk / f"run-{seed}", np.random.default_rng(seed)
    filled: list[float] = []

    def fill() -> None:
        while not screen.saved:
            time.sleep(0.01)
        time.sleep(float(rng.uniform(0.0, 3.0)))
        ballast = disk / "ballast"
        _fill(ballast)
        filled.append(time.monotonic())
        while (screen.alarm_at is None and time.monotonic() < filled[0] + 30) or (
            screen.alarm_at is not None and time.monotonic() < screen.alarm_at + 2
        ):
            time.sleep(0.01)
            _fill(ballast)  # what the run gave back
        ballast.unlink()

    def stop_after(metrics: Any, stop: Any) -> None:
        if filled and not filler.is_alive() and screen.saved[-1] > filled[0]:
            stop()

    filler = threading.Thread(target=fill, daemon=True)
    filler.start()
    try:
        ended = api.train(
            experiment(seed, 10**7, placement, {"checkpoint.every": 3000, "track.tensorboard": True}),
            run_dir=run,
            sinks=[screen],
            callbacks=api.Callbacks(on_step=stop_after),
        ).summary["stopped_by"]
    except QfleetError as error:
        ended = f"{type(error).__name__}: {error}"
        print(f"full disk, seed {seed}: {ended}", file=sys.stderr)
    filler.join()
    seen = outcome(run, screen, "budget" if ended == "callback" else ended, filled[0])
    subprocess.run(["rm", "-rf", str(run)], check=True)
    return seen, None if screen.alarm_at is None else screen.alarm_at - filled[0]


def _fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size) == size:
                    pass


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    with TemporaryDirectory() as place:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", place], check=True)
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", "-l", place], check=True)


def full_disks(seeds: int) -> None:
    print("\n| a really full disk | cases |", " | ".join(COLUMNS), "| told after, s: median, most |")
    print("|---|" + "---|" * (len(COLUMNS) + 2), flush=True)
    for placement in ("inline", "processes"):
        with small_disk() as disk:
            cases = [full_case(seed, placement, disk) for seed in range(seeds)]
        times = [seconds for _, seconds in cases if seconds is not None]
        told = f"{np.median(times):.2f}, {max(times):.2f}" if times else "-"
        print(f"| {placement} | {seeds} |", " | ".join(_counts([seen for seen, _ in cases])), f"| {told} |", flush=True)


def _counts(cases: list[set[str]]) -> list[str]:
    return [str(sum(what in seen for seen in cases)) for what in COLUMNS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--sites-only", action="store_true")
    arguments = parser.parse_args()
    if os.environ.get(SMALL_DISK):
        return full_disks(arguments.seeds)
    print("| place | cases |", " | ".join(COLUMNS), "|\n|---|" + "---|" * (len(COLUMNS) + 1), flush=True)
    for site in SITES:
        with TemporaryDirectory() as directory:
            cases = [site_case(site, seed, Path(directory)) for seed in range(arguments.seeds)]
        print(f"| {site} | {len(cases)} |", " | ".join(_counts(cases)), "|", flush=True)
    if not arguments.sites_only:
        own = ["unshare", "--mount", sys.executable, *sys.argv]
        if subprocess.run(own, env={**os.environ, SMALL_DISK: "1"}, check=False).returncode:
            print("skipped: this process may not mount a small disk (run it as root)", file=sys.stderr)
    return None


if __name__ == "__main__":
    main()
