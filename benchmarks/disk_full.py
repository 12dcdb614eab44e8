"""Fills the disk under runs that go on, and counts what becomes of them.

    python benchmarks/disk_full.py [--faults 20] [--placements inline processes] [--sites-only | --disks-only]

First each place that writes meets a full disk again and again in one run (a failpoint: the error that the system would
give), after a random number of good passings each time; in processes the learner meets it in its state, the replay in
its chunks, the supervisor elsewhere. Then, where this process may mount one, a small disk is really filled to its last
byte at a random moment, until two seconds after the alarm. "told after" is the time from the beginning of what failed
(a checkpoint, a line), or from the disk's last byte, to the notice on the screen.
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
from qfleet.control.monitor import Monitor
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
ONE_OF_A_RUN = ("tensorboard.write",)
"""Places that are given up after the first error: one fault a run."""
ALARMS = ("unsaved", "unwritten", "unremoved")
COLUMNS = ("went on", "told", "told in events.jsonl", "saved after it", "last one good")
SMALL_DISK = "QFLEET_SMALL_DISK"
"""Names the small disk to the part of this program that has it."""
LONGEST_S = 600.0
"""When a run that does not come to its end is ended."""


@dataclass
class Screen(Silent):
    """What a person would see."""

    began: float = 0.0
    """When what may fail began."""
    alarms: list[float] = field(default_factory=list)
    told_after: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)

    @property
    def alarm_at(self) -> float | None:
        return self.alarms[0] if self.alarms else None

    def event(self, record: Any) -> None:
        if record.get("kind") in ALARMS:
            self.alarms.append(time.monotonic())
            self.told_after.append(self.alarms[-1] - self.began)
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


def who(site: str, placement: str) -> str:
    """Return the process that is to meet the full disk."""
    if placement == "inline":
        return "inline"
    return {"checkpoint.state": "learner-0"}.get(site, "replay-0" if site.endswith("chunk") else "supervisor")


def counts_of(site: str, placement: str, faults: int, rng: np.random.Generator) -> list[int]:
    """Return at which passings faults are met; there is a good checkpoint, or line, between two at least."""
    least, most = 2, 4
    if site.endswith("chunk") or site == "model.write":  # several files of one checkpoint
        least, most = 4, 9
    if site == "events.write":
        least, most = 6, 12  # the notices of a fault are events, too
    if site == "checkpoint.state":
        least, most = (10, 18) if placement == "inline" else (4, 8)
    return np.cumsum(rng.integers(least, most, 1 if site in ONE_OF_A_RUN else faults)).tolist()


def site_run(site: str, placement: str, faults: int, seed: int, run: Path) -> tuple[dict[str, int], list[float]]:
    """Let one place meet a full disk in a run; returns how often what of COLUMNS was true, and the times to tell it."""
    counts, screen = counts_of(site, placement, faults, np.random.default_rng(seed)), Screen()
    points = ",".join(f"{who(site, placement)}/{site}:full@{count}" for count in counts)
    until = time.monotonic() + LONGEST_S

    def on_step(metrics: Any, stop: Any) -> None:
        met = len(screen.alarms) >= len(counts)
        after = bool(screen.saved) and screen.saved[-1] > (screen.alarms or [0.0])[-1]
        if (met and after) or time.monotonic() > until:
            stop()

    changes = {"track.every_s": 0.05, "checkpoint.every": 100, "track.tensorboard": site == "tensorboard.write"}
    changes |= {"evaluation.every": 100, "evaluation.max_episode_steps": 5}  # as good as the best, each time
    with _beginnings(screen, site):
        os.environ[failpoints.VARIABLE] = points
        try:
            settings = experiment(seed, 10**7, placement, changes)
            ended = api.train(settings, run_dir=run, sinks=[screen], callbacks=api.Callbacks(on_step=on_step))
            stopped_by = ended.summary["stopped_by"]
        except QfleetError as error:
            stopped_by = f"{type(error).__name__}: {error}"
            print(f"{site}, seed {seed}: {stopped_by}", file=sys.stderr)
        finally:
            del os.environ[failpoints.VARIABLE]
    seen = outcome(run, screen, "budget" if stopped_by == "callback" else stopped_by, 0.0)
    in_file = [event for event in read_jsonl(run / "events.jsonl") if event.get("kind") in ALARMS]
    healed = sum(any(saved > alarm for saved in screen.saved) for alarm in screen.alarms)
    whole = {what: len(counts) * (what in seen) for what in ("went on", "last one good")}
    return {
        **whole,
        "told": len(screen.alarms),
        "told in events.jsonl": len(in_file),
        "saved after it": healed,
    }, screen.told_after


@contextlib.contextmanager
def _beginnings(screen: Screen, site: str) -> Iterator[None]:
    """Note when what fails begins: a checkpoint, or in other places the fault itself."""
    begin_saving, act = Monitor._begin_saving, failpoints._act

    def begin(monitor: Monitor) -> Any:
        if site.startswith(("checkpoint", "model")):
            screen.began = time.monotonic()
        return begin_saving(monitor)

    def acted(point: Any) -> None:
        if not site.startswith(("checkpoint", "model")):
            screen.began = time.monotonic()
        act(point)

    Monitor._begin_saving, failpoints._act = begin, acted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Monitor._begin_saving, failpoints._act = begin_saving, act  # type: ignore[method-assign]


def sites(faults: int, placement: str, wanted: list[str]) -> None:
    """Print the table of all places in one placement."""
    print(f"\n| place, {placement} | faults |", " | ".join(COLUMNS), "| told after, s: median, most |")
    print("|---|" + "---|" * (len(COLUMNS) + 2), flush=True)
    for site in wanted:
        total, times, runs = dict.fromkeys(COLUMNS, 0), [], faults if site in ONE_OF_A_RUN else 1
        for seed in range(runs):
            with TemporaryDirectory() as directory:
                seen, told_after = site_run(site, placement, faults, seed, Path(directory) / "run")
            total = {what: total[what] + seen[what] for what in COLUMNS}
            times += told_after
        told = f"{np.median(times):.2f}, {max(times):.2f}" if times else "-"
        print(f"| {site} | {faults} |", " | ".join(str(total[what]) for what in COLUMNS), f"| {told} |", flush=True)


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
    filler.join(60)
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


def full_disks(seeds: int, placements: list[str]) -> None:
    print("\n| a really full disk | cases |", " | ".join(COLUMNS), "| told after, s: median, most |")
    print("|---|" + "---|" * (len(COLUMNS) + 2), flush=True)
    for placement in placements:
        with small_disk() as disk:
            cases = [full_case(seed, placement, disk) for seed in range(seeds)]
        times = [seconds for _, seconds in cases if seconds is not None]
        told = f"{np.median(times):.2f}, {max(times):.2f}" if times else "-"
        print(f"| {placement} | {seeds} |", " | ".join(_counts([seen for seen, _ in cases])), f"| {told} |", flush=True)


def _counts(cases: list[set[str]]) -> list[str]:
    return [str(sum(what in seen for seen in cases)) for what in COLUMNS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="at each place, and really full disks")
    parser.add_argument("--placements", nargs="+", default=["inline", "processes"])
    parser.add_argument("--sites", nargs="*", choices=SITES, default=SITES)
    parser.add_argument("--sites-only", action="store_true")
    parser.add_argument("--disks-only", action="store_true")
    arguments = parser.parse_args()
    if os.environ.get(SMALL_DISK):
        return full_disks(arguments.faults, arguments.placements)
    for placement in [] if arguments.disks_only else arguments.placements:
        sites(arguments.faults, placement, arguments.sites)
    if not arguments.sites_only:
        own = ["unshare", "--mount", sys.executable, *sys.argv]
        if subprocess.run(own, env={**os.environ, SMALL_DISK: "1"}, check=False).returncode:
            print("skipped: this process may not mount a small disk (run it as root)", file=sys.stderr)
    return None


if __name__ == "__main__":
    main()
