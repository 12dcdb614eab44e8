"""Breaks one run again and again for a long time, and looks at its memory and its score.

    python benchmarks/soak.py [--minutes 30] [--every 10] [--beside 5] [--beside-minutes 5] [--json FILE]

A DQN in processes on Acrobot-v1, whose scores reach no ceiling as CartPole's do: two actors, a prioritised replay that
is full within seconds, a learner, an evaluator. Every so many seconds one of their processes is killed, or stopped for
up to a second. Nobody helps. Memory is the sum over all processes of what each has to itself and its share of what
it has with others (PSS), without pages of files: these are code, of which other programs of the machine may have a
share, too, so that the figure would grow when they end. Its growth is that from the fifth of the samples after the
warm-up to the last fifth, by their medians, and is told for the driver alone, too, since no death makes that one young
again. The score is the mean of all evaluations
after the warm-up; it is compared with that of runs that nothing is done to, by the interval in which 95 of 100 of them
are expected (mean and Student's t of their scores). The warm-up is the first third of a run, ten minutes at most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "program"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "chaos"))

import numpy as np
import psutil
from breaking import Breaker
from case import nothing_left
from cases import PAUSES, Case

import qfleet.session
from qfleet import api
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import RoleFailure
from qfleet.experiment import Experiment, with_changes
from qfleet.observe.sinks import read_jsonl
from qfleet.presets import preset
from qfleet.program import place

SAMPLE_S = 2.0
ALL, DRIVER = 1, 2
"""Where in a sample whose memory is."""
WARM_UP, MOST_WARM_UP_S = 1 / 3, 600.0
# Of Student's t with 1, 2, 3, ... degrees of freedom, what 95 of 100 are within.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def experiment() -> Experiment:
    """Return a run without an end; a callback ends it."""
    changes = {
        "env.kind": "gym",
        "env.id": "Acrobot-v1",
        "env.reward_scale": 0.1,
        "network.input.scale": [1.0, 1.0, 1.0, 1.0, 0.1, 0.05],
        "placement": "processes",
        "actors": 2,
        "env_steps": 10**9,
        "replay.capacity": 20_000,
        "replay.sampler": {"kind": "prioritised", "initial": "actor"},
        "learner.learning_starts": 1000,
        "learner.snapshot_s": 0.5,
        "evaluation": {"every": 5000, "episodes": 10, "envs": 10, "test_episodes": 10, "target": None},
        "checkpoint.every": 20_000,
    }
    return with_changes(preset("cartpole"), changes)


@dataclass
class Sampler(threading.Thread):
    """Notes every few seconds how much memory this process and all that it has started use."""

    began: float
    samples: list[tuple[float, float, float]] = field(default_factory=list)
    """Seconds since the beginning, megabytes of all processes, and those of the driver."""

    def __post_init__(self) -> None:
        super().__init__(name="sampler", daemon=True)
        self._over = threading.Event()

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            own = used = own_memory(os.getpid())
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    used += own_memory(process.pid)
            self.samples.append((round(time.monotonic() - self.began, 1), round(used / 1e6, 2), round(own / 1e6, 2)))

    def stop(self) -> None:
        self._over.set()
        self.join()


def own_memory(pid: int) -> int:
    """Return a process's share of memory that no file of a disk is behind, in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(1024 * int(words[1]) for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:"))


def soak(minutes: float, every_s: float, seed: int) -> dict[str, Any]:
    """Run for so long with a fault every so many seconds, none if that is 0; returns what was seen."""
    began = time.monotonic()
    until = began + 60 * minutes
    between = (every_s, every_s) if every_s else (1e9, 1e9)
    breaker = Breaker(Case(seed, "one learner", PAUSES, 0, 10**9, "", between), np.random.default_rng(seed))
    sampler = Sampler(began)

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if time.monotonic() > until:
            breaker.stop()  # what is broken now could not be repaired in time to be seen
            stop()

    failed, summary = "", {}
    with TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        qfleet.session.place = lambda *arguments: shown(breaker, place(*arguments))
        sampler.start()
        breaker.start()
        try:
            summary = api.train(experiment(), seed=seed, run_dir=run_dir, callbacks=Callbacks(on_step=on_step)).summary
            nothing_left()
        except (RoleFailure, AssertionError) as error:
            failed = f"{type(error).__name__}: {error}"
        breaker.stop()
        sampler.stop()
        events = list(read_jsonl(run_dir / "events.jsonl"))
    return {
        "minutes": round((time.monotonic() - began) / 60, 2),
        "failed": failed,
        "env_steps": summary.get("env_steps"),
        "kills": len(breaker.killed),
        "pauses": breaker.paused,
        "repairs": [
            [event["role"], round(event["seconds_to_repair"], 2)] for event in events if event["event"] == "restart"
        ],
        "evaluations": [[event["wall_s"], event["mean"]] for event in events if event["event"] == "evaluation"],
        "memory": sampler.samples,
    }


def shown(breaker: Breaker, placement: Any) -> Any:
    """Let the breaker see a placement."""
    breaker.placement = placement
    return placement


def warm_up_s(minutes: float) -> float:
    return min(60 * minutes * WARM_UP, MOST_WARM_UP_S)


def growth(run: dict[str, Any], whose: int = ALL) -> float:
    """Return by which share memory grew after the warm-up, that of all processes or of one."""
    used = [sample[whose] for sample in run["memory"] if sample[0] > warm_up_s(run["minutes"])]
    fifth = max(len(used) // 5, 1)
    return statistics.median(used[-fifth:]) / statistics.median(used[:fifth]) - 1


def score(run: dict[str, Any]) -> float:
    """Return the mean of the evaluations after the warm-up."""
    return statistics.mean(mean for seconds, mean in run["evaluations"] if seconds > warm_up_s(run["minutes"]))


def interval(scores: list[float]) -> tuple[float, float]:
    """Return where 95 of 100 further scores are expected."""
    reach = T95[len(scores) - 2] * statistics.stdev(scores) * (1 + 1 / len(scores)) ** 0.5
    return statistics.mean(scores) - reach, statistics.mean(scores) + reach


def grown(run: dict[str, Any]) -> str:
    """Return how memory grew, in words."""
    return f"{100 * growth(run):+.2f} %, the driver's {100 * growth(run, DRIVER):+.2f} %"


def told(broken: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Return what came of it, for a person."""
    seconds, runs = [seconds for _, seconds in broken["repairs"]], [broken, *others]
    rows = [
        f"- {broken['minutes']} minutes, {broken['kills']} kills and {broken['pauses']} pauses; came to its end by"
        f" itself: {'no, ' + broken['failed'] if broken['failed'] else 'yes'}",
        f"- repaired within {np.percentile(seconds, 95):.2f} s in 95 of 100 deaths, {max(seconds):.2f} s at most",
        *(f"- memory after the warm-up: {grown(run)}{'' if run is broken else ', without faults'}" for run in runs),
        f"- {broken['env_steps']:,} steps" if broken["env_steps"] else "- no steps counted",
    ]
    if len(others) > 1:
        low, high = interval([score(run) for run in others])
        inside = "inside" if low <= score(broken) <= high else "OUTSIDE"
        rows.append(
            f"- score {score(broken):.1f}, {inside} of {low:.1f} to {high:.1f} of {len(others)} runs without faults"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--beside", type=int, default=5, help="runs without faults, ten at most")
    parser.add_argument("--beside-minutes", type=float, default=5.0)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("soak.json"))
    options = parser.parse_args()
    runs = [soak(options.minutes, options.every, seed=100)]
    for seed in range(101, 101 + options.beside):
        runs.append(soak(options.beside_minutes, 0.0, seed))
        options.json.write_text(json.dumps({"broken": runs[0], "others": runs[1:]}) + "\n")
    options.json.write_text(json.dumps({"broken": runs[0], "others": runs[1:]}) + "\n")
    print(told(runs[0], runs[1:]))
    if any(run["failed"] for run in runs):
        sys.exit("; ".join(run["failed"] for run in runs if run["failed"]))


if __name__ == "__main__":
    main()
