"""qfleet beside RLlib's DQN on the cores of this machine, in turns: steps/s at equal batches and updates for each step.

    python benchmarks/rllib.py [--peers .peers] [--rounds 3] [--seconds 15] [--games cartpole pong]

Each side has the arrangement that is fastest for it in a first look. RLlib takes a few steps more for each update than
it is asked to; it says how many, and ours takes as many. Ours on CartPole: the fused loop of the preset, and a pipeline
in processes that plays the very Gymnasium environment that RLlib plays. A ratio is that of one round.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from qfleet.bench.pace import measure_pace
from qfleet.bench.peers import peer_python, run_peer
from qfleet.bench.pong import experiment as pong
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset

SCRIPT = "rllib_dqn.py"
AIMS = {"cartpole": 10.0, "pong": 1.5}
ARRANGEMENTS = {"cartpole": ((0, 10), (1, 10), (2, 5)), "pong": ((0, 4), (1, 4), (2, 2))}
"""RLlib's runners, and the environments of each."""
CARTPOLE: dict[str, Any] = {
    "network.hidden": [128, 128],
    "learner.batch_size": 128,
    "learner.learning_starts": 500,
    "replay.capacity": 10_000,
    "replay.sampler.kind": "uniform",
}
SAME = {"env.kind": "gym", "env.id": "CartPole-v1", "placement": "processes", "topology": "pipeline"}
Ours = dict[str, dict[str, Any]]
"""Settings of each arrangement, by what a person reads."""
CARTPOLES: Ours = {
    "fused loop, 16 environments": {**CARTPOLE, "actor.envs": 16},
    "processes, Gymnasium's own, 1 actor": {**CARTPOLE, **SAME, "actor.envs": 16, "actor.unroll": 4},
    "processes, Gymnasium's own, 2 actors": {**CARTPOLE, **SAME, "actor.envs": 16, "actor.unroll": 4, "actors": 2},
}
PONGS: Ours = {
    "processes, 1 thread": {"threads": 1},
    "processes, 2 threads": {"threads": 2},
    "processes, all in bf16": {"threads": 1, "accel.precision": "bf16"},
}


def ours(base: Experiment, changes: dict[str, Any], steps_per_update: float, seconds: float) -> float:
    """Return our steps a second with so many steps for each update."""
    wanted = with_changes(base, {**changes, "learner.train_period": steps_per_update})
    return measure_pace(wanted, UserCode(), seconds).steps_per_s


def theirs(python: Path, game: str, arrangement: tuple[int, int], seconds: float) -> tuple[float, float]:
    """Return RLlib's steps a second, and its steps for each update."""
    runners, envs = map(str, arrangement)
    words = [game, "--seconds", str(seconds), "--runners", runners, "--envs", envs]
    found = run_peer(python, SCRIPT, *words)
    return found["steps_per_s"], found["steps_per_update"]


def measure(python: Path, game: str, rounds: int, seconds: float) -> list[str]:
    """Return the rows of a game."""
    base, ways = (preset("cartpole"), CARTPOLES) if game == "cartpole" else (pong(), PONGS)
    peer: Callable[[tuple[int, int]], tuple[float, float]] = lambda way: theirs(python, game, way, seconds)  # noqa: E731
    best = max(ARRANGEMENTS[game], key=lambda way: peer(way)[0])
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    peers: list[tuple[float, float]] = []
    for _ in range(rounds):
        peers.append(peer(best))
        for name, changes in ways.items():
            speeds[name].append(ours(base, changes, peers[-1][1], seconds))
    rival = f"{statistics.median(speed for speed, _ in peers):,.0f} ({best[0]} runners of {best[1]})"
    rows = []
    for name, found in speeds.items():
        ratios = [speed / other for speed, (other, _) in zip(found, peers, strict=True)]
        spread = f"{statistics.median(ratios):.1f} [{min(ratios):.1f}, {max(ratios):.1f}]"
        pace = f"{statistics.median(steps for _, steps in peers):.1f}"
        rows.append(
            f"| {game}: {name} | {pace} | {statistics.median(found):,.0f} | {rival} | {spread} | {AIMS[game]:g} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".peers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--games", nargs="+", choices=AIMS, default=list(AIMS))
    wanted = parser.parse_args()
    python = peer_python(wanted.peers)
    assert python is not None
    print("| game: ours | steps an update | qfleet, steps/s | RLlib, steps/s | ratio, median [range] | aim |")
    print("|---|---|---|---|---|---|")
    for game in wanted.games:
        print("\n".join(measure(python, game, wanted.rounds, wanted.seconds)), flush=True)


if __name__ == "__main__":
    main()
