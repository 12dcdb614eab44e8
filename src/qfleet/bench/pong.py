"""Pong on the cores of this machine, beside Stable-Baselines3: training at one update of 32 per 4 steps, and acting."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from qfleet.bench.pace import Pace, measure_pace
from qfleet.bench.peers import peer_python, run_peer
from qfleet.bench.stragglers import Nowhere, actor_rate
from qfleet.bench.table import Row
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.roles.actor import Actor, ActorHandles
from qfleet.setups import actor_setup

BUSY, RATIO, AIM, ACTING_RATIO = 0.95, 1.6, 2.5, 5.0
ACTING_ENVS, ACTING_GROUPS = 64, 4
PEER_ENVS, PEER_TICKS = 32, 100
"""Games of the peer where it may play more than the one of its published settings, and ticks of them that are timed."""
SCRIPT = "sb3_pong.py"
Rate = Callable[[int], float]
"""Steps a second with so many threads."""


def measure(peers: Path | None = None, rounds: int = 3, seconds: float = 8.0, peer_steps: int = 500) -> list[Row]:
    """Train and act on both sides in turn, each with the better of one thread and one for every core."""
    python = peer_python(peers)
    paces: dict[str, list[Pace]] = {"fp32": [], "bf16": []}

    def ours(precision: str, threads: int) -> float:
        paces[precision].append(train(threads, seconds, precision))
        return paces[precision][-1].steps_per_s

    def theirs(threads: int, *more: str) -> float:
        words = ["--env-steps", str(peer_steps), "--threads", str(threads), *more]
        return float(run_peer(python or Path(), SCRIPT, *words)["steps_per_s"])

    sides: dict[str, Rate] = {
        "fp32": lambda threads: ours("fp32", threads),
        "bf16": lambda threads: ours("bf16", threads),
        "acting": lambda threads: act(threads, seconds / 2),
    }
    if python is not None:
        sides["peer"] = theirs
        sides["peer acting"] = lambda threads: theirs(threads, "--acting-only")
        several = ("--acting-only", "--envs", str(PEER_ENVS), "--env-steps", str(PEER_ENVS * PEER_TICKS))
        sides["peer acting in several"] = lambda threads: theirs(threads, *several)
    rates = in_turns(sides, rounds)
    busy = statistics.median(pace.busy_share("learner") for pace in paces["fp32"])
    trained, acted, several_acted = (rates.get(f"peer{what}", []) for what in ("", " acting", " acting in several"))
    training, games = "Pong in processes, one update of 32 in 4 steps", f"{ACTING_ENVS} games, bf16"
    acting = f"acting alone in Pong, {games}"
    return [
        Row(
            what=f"{training}, fp32: share of its time that the learner works",
            ours=f"{busy:.1%}",
            goal=f"at least {BUSY:.0%}",
            met=busy >= BUSY,
        ),
        _beside(f"{training}, acting in bf16", rates["fp32"], trained, RATIO, f"ratio {RATIO}"),
        _beside(f"{training}, all in bf16", rates["bf16"], trained, RATIO, f"ratio {RATIO}, aim {AIM}"),
        _beside(f"{acting}; the peer one game", rates["acting"], acted, ACTING_RATIO, f"ratio {ACTING_RATIO:g}"),
        _beside(f"{acting}; the peer {PEER_ENVS} games", rates["acting"], several_acted),
    ]


def in_turns(sides: Mapping[str, Rate], rounds: int) -> dict[str, list[float]]:
    """Return each side's rates, one a round, with the number of threads that was best for it in a first look."""
    threads = {name: max(_threads(), key=rate) for name, rate in sides.items()}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, rate in sides.items():
            rates[name].append(rate(threads[name]))
    return rates


def train(threads: int, seconds: float, precision: str) -> Pace:
    """Return the pace of training in processes, the learner with so many threads and in this number format."""
    return measure_pace(
        with_changes(experiment(), {"threads": threads, "accel.precision": precision}), UserCode(), seconds
    )


def act(threads: int, seconds: float) -> float:
    """Return the steps a second of one actor whose network has so many threads, while games step in others."""
    changes = {"actor.envs": ACTING_ENVS, "actor.groups": ACTING_GROUPS, "env_steps": 10**12}
    wanted = with_changes(experiment(), changes)
    counter, before = Nowhere(), torch.get_num_threads()
    setup = actor_setup(wanted, env_spec(wanted.env), UserCode(), index=0)
    actor = Actor(setup, ActorHandles(experience=Nowhere(), weights=Nowhere(), env_steps=counter))
    torch.set_num_threads(threads)
    try:
        actor_rate(actor, counter, seconds / 4)  # loads and allocates
        return actor_rate(actor, counter, seconds)
    finally:
        torch.set_num_threads(before)
        actor.close()


def experiment() -> Experiment:
    """Return DQN on Pong at the settings that the peer's script has, where both have them."""
    return with_changes(
        preset("atari:pong"),
        {
            "placement": "processes",
            "device": "cpu",
            "replay.capacity": 10_000,
            "learner.learning_starts": 200,
            "learner.publish_period": 8,
            "agent.target.period": 250,
            "exploration.start": 0.01,
            "inference.precision": "bf16",
            "env.threads": 1,
        },
    )


def _beside(
    what: str, ours: Sequence[float], theirs: Sequence[float], least: float | None = None, goal: str = ""
) -> Row:
    """Return both sides' medians, and that of the ratios of each round: the machine may have been slower in one.

    Without a `least` ratio there is nothing to be met.
    """
    rate, peer = statistics.median(ours), statistics.median(theirs) if theirs else None
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if theirs else None
    return Row(
        what=what,
        ours=f"{rate:,.0f} steps/s",
        peer=f"{peer:,.0f} steps/s (Stable-Baselines3)" if peer else "",
        ratio=ratio,
        goal=goal,
        met=None if ratio is None or least is None else ratio >= least,
    )


def _threads() -> list[int]:
    return sorted({1, len(os.sched_getaffinity(0))})
