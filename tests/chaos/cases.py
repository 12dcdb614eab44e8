"""What a seed stands for: the run that is broken, and what is done to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

KILLS, PAUSES, POINTS, LOSS = "kills", "kills and pauses", "failpoints", "lost calls"
DELAYS, FULL, SLOW, CLOCK = "late messages", "full disk", "slow disk", "clock jumps and kills"
DAMAGE, NAN, HANGS = "damaged file", "NaN", "hanging environments"
PACKETS, CUT, PARTED = "lost packets", "short partition", "long partition"
FURTHER = 10_000
"""The first seed of the cases of further faults, which have turns of their own."""
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
    "ray": {"placement": "ray"},
    "ray, two learners": {"placement": "ray", "learners": 2},
    "ray, two nodes": {"placement": "ray"},
}
"""Settings beside those of every case, by name."""
FAR_RUNS: dict[str, dict[str, Any]] = {
    "ray, two machines": {"placement": "ray", "address": "auto", "track.every_s": 0.5},
    "ray, two machines, elastic": {
        "placement": "ray",
        "address": "auto",
        "track.every_s": 0.5,
        "elastic.max_actors": 2,
        "elastic.settle_s": 1.0,
        "balance": "off",
    },
}
"""Runs whose actors are on another machine, which is a network namespace of this one."""
SETTINGS = RUNS | FAR_RUNS
FURTHER_RUNS = {
    DELAYS: ("one learner", "two shards", "two learners", "packed weights", "inference server"),
    FULL: ("one learner", "two shards", "mapped replay", "compressed replay", "two learners"),
    SLOW: ("one learner", "two shards", "mapped replay", "compressed replay", "two learners"),
    CLOCK: ("one learner", "two learners", "parameter server", "inference server"),
    DAMAGE: ("one learner", "two shards", "compressed replay", "full replay"),
    NAN: ("one learner", "two shards"),
    HANGS: ("one learner", "two groups", "inference server", "ray"),
    PACKETS: tuple(FAR_RUNS),
    CUT: tuple(FAR_RUNS),
    PARTED: tuple(FAR_RUNS),
}
"""The runs that meet each of the further faults, in turn."""
CUTS_S = {PACKETS: (5.0, 15.0), CUT: (2.0, 5.0), PARTED: (25.0, 35.0)}
"""The fewest and the most seconds that the other machine cannot be reached, or only badly; Ray gives it up after 10."""
LOSSES = {
    "CoreWorkerService.grpc_client.PushTask": {
        "num_failures": -1,
        "req_failure_prob": 9,
        "resp_failure_prob": 8,
        "in_flight_failure_prob": 8,
    }
}
"""What Ray does to calls of actors' methods: of a hundred, so many do not arrive, have their answer lost, or run while
their caller is told already that they failed; -1 means that there is no end to it."""
SITES = {
    "actor": ("channel.before_send", "channel.after_write", "channel.after_send", "worker.step"),
    "replay": ("replay.before_commit", "replay.after_commit", "channel.before_ack", "channel.after_send"),
    "learner": ("keep.before_commit", "keep.after_commit", "channel.before_ack", "worker.step"),
    "evaluator": ("keep.before_commit", "keep.after_commit"),
}
"""Failpoints that each kind of role passes in every run."""
DISK_SITES = {
    "learner-0/checkpoint.state": 2,
    "replay-0/checkpoint.state": 2,
    "replay-0/checkpoint.before_chunk": 2,
    "replay-0/checkpoint.in_chunk": 2,
    "supervisor/checkpoint.before_manifest": 2,
    "supervisor/checkpoint.before_rename": 2,
    "supervisor/metrics.write": 3,
    "supervisor/events.write": 6,
}
"""Where something is written to a disk, with the last passing that is broken: the last checkpoint has to be written."""
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
    between_s: tuple[float, float] = (0.02, 0.5)
    """The fewest and the most seconds between two faults."""
    cut_s: float = 0.0
    """How long the network between two machines is broken."""
    hang_at: int = 0
    """The step at which the first environment of each actor hangs, in its first life; 0 for none."""

    @property
    def on_ray(self) -> bool:
        """Whether its roles are Ray actors."""
        return SETTINGS[self.run].get("placement") == "ray"

    @property
    def apart(self) -> bool:
        """Whether its actors are on another machine."""
        return self.run in FAR_RUNS

    @property
    def nodes(self) -> int:
        """How many nodes of Ray it has; its actors are on the second one if there are two."""
        return 2 if self.run == "ray, two nodes" else 1

    @property
    def environment(self) -> dict[str, str]:
        """What Ray must find in the environment before it is imported."""
        lossy = {"RAY_testing_rpc_failure": json.dumps(LOSSES)} if self.faults == LOSS else {}
        return {"RAY_ENABLE_AUTO_CONNECT": "0", **lossy}  # who asks a Ray that has ended is told so

    @property
    def settings(self) -> dict[str, Any]:
        """What its run has beside the settings of every case."""
        return {"seed": self.seed, "checkpoint.every": min(1000, self.env_steps // 3), **SETTINGS[self.run]}


def case(seed: int) -> Case:
    """Return the case of a seed. Runs and faults take turns, so that any stretch of seeds has all of them."""
    rng = np.random.default_rng(seed)
    if seed >= FURTHER:
        return _further(seed, rng)
    run = list(RUNS)[seed % len(RUNS)]
    on_ray = RUNS[run].get("placement") == "ray"
    faults = (KILLS, POINTS, LOSS if on_ray else KILLS, PAUSES)[seed // len(RUNS) % 4]
    if faults == POINTS:
        return Case(seed, run, faults, 2500, 0, ",".join(_points(rng, RUNS[run])))
    if on_ray:  # that of a steward costs seconds of a core: for the next one torch is imported anew
        return Case(seed, run, faults, _steps_on_ray(run, faults), int(rng.integers(5, 9)), "", between_s=(0.5, 8.0))
    return Case(seed, run, faults, 12_000, int(rng.integers(15, 25)), "")


def _steps_on_ray(run: str, faults: str) -> int:
    """Return how long a run is: it takes Ray two seconds to say that a call is lost, on which two nodes wait most."""
    if faults == LOSS:
        return 900 if run == "ray, two nodes" else 12_000
    return 40_000


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


def _further(seed: int, rng: np.random.Generator) -> Case:
    """Return a case of the further faults."""
    turn, faults = divmod(seed - FURTHER, len(FURTHER_RUNS))
    fault, runs = list(FURTHER_RUNS.items())[faults]
    run = runs[turn % len(runs)]
    if fault in CUTS_S:
        return Case(seed, run, fault, 8000, 0, "", cut_s=float(rng.uniform(*CUTS_S[fault])))
    if fault == CLOCK:
        return Case(seed, run, fault, 12_000, int(rng.integers(4, 8)), "", between_s=(0.1, 1.0))
    points = {DELAYS: _delays, FULL: _full, SLOW: _slow}.get(fault, lambda rng: [])(rng)
    return Case(seed, run, fault, 6000, 0, ",".join(points), hang_at=int(rng.integers(20, 200)) * (fault == HANGS))


def _delays(rng: np.random.Generator) -> list[str]:
    """Return where messages of each role are late."""
    names = (("actor-0", "actor"), ("actor-1", "actor"), ("replay-0", "replay"), ("learner-0", "learner"))
    sites = [f"{name}/{site}" for name, kind in names for site in SITES[kind] if site.startswith("channel")]
    return [f"{rng.choice(sites)}:slow@{rng.integers(1, 100)}" for _ in range(12)]


def _full(rng: np.random.Generator) -> list[str]:
    """Return two places where the disk is full."""
    chosen = rng.choice(list(DISK_SITES), 2, replace=False)
    return [f"{site}:full@{rng.integers(1, DISK_SITES[site] + 1)}" for site in chosen]


def _slow(rng: np.random.Generator) -> list[str]:
    """Return where the disk takes its time."""
    return [f"{rng.choice(list(DISK_SITES))}:slow@{rng.integers(1, 12)}" for _ in range(20)]
