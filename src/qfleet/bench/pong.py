"""Pong on the cores of this machine, beside Stable-Baselines3: training at one update of 32 per 4 steps, and acting."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
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
ACTING_ENVS = 32
SCRIPT = "sb3_pong.py"
Peer = Callable[[int, bool], float]
"""Returns the peer's steps a second with so many threads, training or only acting."""


def measure(peers: Path | None = None, rounds: int = 3, seconds: float = 15.0, peer_steps: int = 1_500) -> list[Row]:
    """Train and act on both sides in turn, each with the better of one thread and one for every core."""
    python = peer_python(peers)

    def peer(threads: int, acting: bool) -> float:
        words = ["--env-steps", str(peer_steps), "--threads", str(threads), *(["--acting-only"] if acting else [])]
        return float(run_peer(python or Path(), SCRIPT, *words)["steps_per_s"])

    paces: list[Pace] = []
    acting, their_training, their_acting = [], [], []
    for _ in range(rounds):
        paces.append(max((train(threads, seconds) for threads in _threads()), key=lambda pace: pace.steps_per_s))
        acting.append(max(act(threads, seconds / 3) for threads in _threads()))
        if python is not None:
            their_training.append(max(peer(threads, False) for threads in _threads()))
            their_acting.append(max(peer(threads, True) for threads in _threads()))
    busy = statistics.median(pace.busy_share("learner") for pace in paces)
    return [
        Row(
            what="Pong in processes, one update of 32 in 4 steps, fp32: share of its time that the learner works",
            ours=f"{busy:.1%}",
            goal=f"at least {BUSY:.0%}",
            met=busy >= BUSY,
        ),
        _beside(
            "that run, acting in bf16",
            [pace.steps_per_s for pace in paces],
            their_training,
            RATIO,
            f"ratio {RATIO}, aim {AIM}",
        ),
        _beside(
            f"acting alone in Pong, {ACTING_ENVS} games, bf16, beside the collection of one game",
            acting,
            their_acting,
            ACTING_RATIO,
            f"ratio {ACTING_RATIO:g}",
        ),
    ]


def train(threads: int, seconds: float) -> Pace:
    """Return the pace of training in processes, the learner with so many threads."""
    return measure_pace(with_changes(experiment(), {"threads": threads}), UserCode(), seconds)


def act(threads: int, seconds: float) -> float:
    """Return the steps a second of one actor, network and games with so many threads."""
    changes = {"actor.envs": ACTING_ENVS, "env.threads": threads, "env_steps": 10**12}
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
            "accel.channels_last": "on",
            "env.threads": 1,
        },
    )


def _beside(what: str, ours: Sequence[float], theirs: Sequence[float], least: float, goal: str) -> Row:
    rate, peer = statistics.median(ours), statistics.median(theirs) if theirs else None
    ratio = rate / peer if peer else None
    return Row(
        what=what,
        ours=f"{rate:,.0f} steps/s",
        peer=f"{peer:,.0f} steps/s (Stable-Baselines3)" if peer else "",
        ratio=ratio,
        goal=goal,
        met=None if ratio is None else ratio >= least,
    )


def _threads() -> list[int]:
    return sorted({1, len(os.sched_getaffinity(0))})
