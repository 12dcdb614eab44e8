"""What a seed stands for: the run that is broken, and what is done to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

KILLS, PAUSES, POINTS = "kills", "kills and pauses", "failpoints"
RUNS: dict[str, dict[str, Any]] = {
    "one learner": {},
    "uniform replay": {"replay.sampler": {"kind": "uniform"}},
    "two shards": {"replay.shards": 2},
    "full replay": {"replay.capacity": 800, "replay.segment": 20},
    "mapped replay": {"replay.storage": {"kind": "mapped"}},
    "compressed replay": {"replay.storage": {"kind": "lz4", "smallest": 1}},
    "inference server": {"inference.kind": "served"},
    "two groups": {"actor.groups": 2, "actor.envs": 4},
    "packed weights": {"learner.weights.kind": "delta"},
    "two learners": {"learners": 2},
    "two learners, two shards": {"learners": 2, "replay.shards": 2},
    "three learners, fewer": {"learners": 3, "parallel.after_death": "fewer"},
    "parameter server": {"learners": 2, "parallel.update.kind": "server", "parallel.update.servers": 2},
}
"""Settings beside those of every case, by name."""
SITES = {
    "actor": ("channel.before_send", "channel.after_write", "channel.after_send", "worker.step"),
    "replay": ("replay.before_commit", "replay.after_commit", "channel.before_ack", "channel.after_send"),
    "learner": ("keep.before_commit", "keep.after_commit", "channel.before_ack", "worker.step"),
    "evaluator": ("keep.before_commit", "keep.after_commit"),
}
"""Failpoints that each kind of role passes in every run."""
MOST_PASSINGS = {"keep.before_commit": 3, "keep.after_commit": 3}
"""Sites that are passed seldom, with the last passing at which a role dies there; others are passed often."""


@dataclass(frozen=True)
class Case:
    """One seeded case."""

    seed: int
    run: str
    faults: str
    env_steps: int
    kills: int
    """How many processes are killed at random moments."""
    points: str
    """Failpoints, as `QFLEET_FAIL` has them."""

    @property
    def settings(self) -> dict[str, Any]:
        """What its run has beside the settings of every case."""
        return {"seed": self.seed, **RUNS[self.run]}


def case(seed: int) -> Case:
    """Return the case of a seed. Runs and faults take turns, so that any stretch of seeds has all of them."""
    rng = np.random.default_rng(seed)
    run = list(RUNS)[seed % len(RUNS)]
    faults = (KILLS, POINTS, KILLS, PAUSES)[seed // len(RUNS) % 4]
    if faults == POINTS:
        return Case(seed, run, faults, 2500, 0, ",".join(_points(rng, RUNS[run])))
    return Case(seed, run, faults, 12_000, int(rng.integers(15, 25)), "")


def _points(rng: np.random.Generator, settings: dict[str, Any]) -> list[str]:
    """Return one failpoint for each of some roles."""
    counts = {
        "actor": 2,
        "replay": settings.get("replay.shards", 1),
        "learner": settings.get("learners", 1),
        "evaluator": 1,
    }
    names = [(kind, f"{kind}-{index}") for kind, count in counts.items() for index in range(count)]
    chosen = rng.permutation(len(names))[: rng.integers(2, len(names) + 1)]
    points = []
    for kind, name in (names[number] for number in sorted(chosen)):
        site = SITES[kind][rng.integers(len(SITES[kind]))]
        points.append(f"{name}/{site}:kill@{rng.integers(1, MOST_PASSINGS.get(site, 60) + 1)}")
    return points
