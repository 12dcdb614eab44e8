"""What it brings to sample and learn at the same time: a run in processes beside the same run inline, on two cores."""

from __future__ import annotations

import statistics
from functools import partial

from qfleet.algo.torsos import MlpConfig
from qfleet.bench.pace import Pace, measure_pace
from qfleet.bench.stragglers import STEP_US, Busy
from qfleet.bench.table import Row
from qfleet.core.usercode import UserCode
from qfleet.envs import GymConfig
from qfleet.experiment import Experiment
from qfleet.roles.actor import ActorConfig
from qfleet.roles.learner_setup import LearnerConfig

GOAL = 1.6
EQUAL = 0.1
"""How much the cost of learning may differ from that of sampling."""
CODE = UserCode(env=partial(Busy, None))
_CALIBRATIONS = 4


def measure(seconds: float = 6.0, rounds: int = 3) -> list[Row]:
    """Find the pace at which learning costs as much as sampling, then run both placements in turn."""
    period, balance = calibrated(seconds)
    inline, processes = [], []
    for _ in range(rounds):
        inline.append(measure_pace(experiment("inline", period), CODE, seconds).steps_per_s)
        processes.append(measure_pace(experiment("processes", period), CODE, seconds).steps_per_s)
    ours, one = statistics.median(processes), statistics.median(inline)
    return [
        Row(
            what=f"an environment of {STEP_US:.0f} us a step, updates that cost {balance:.2f} of sampling: processes",
            ours=f"{ours:,.0f} steps/s",
            peer=f"{one:,.0f} steps/s (inline)",
            ratio=ours / one,
            goal=f"ratio {GOAL}",
            met=ours / one >= GOAL if abs(balance - 1) <= EQUAL else None,
        )
    ]


def calibrated(seconds: float) -> tuple[float, float]:
    """Return the steps for each update at which an inline run learns as long as it samples, and how nearly it does."""
    period = 16.0
    for _ in range(_CALIBRATIONS):
        balance = cost_of_learning(measure_pace(experiment("inline", period), CODE, seconds / 2))
        if abs(balance - 1) <= EQUAL / 2:
            break
        period *= balance
    return period, balance


def cost_of_learning(pace: Pace) -> float:
    """Return how long a run learned for each second that it acted."""
    return pace.busy_s["learner"] / pace.busy_s["actor"]


def experiment(placement: str, period: float) -> Experiment:
    """Return a run with one thread in each role that makes an update in every `period` steps."""
    return Experiment.model_validate({
        "placement": placement,
        "topology": "pipeline",
        "device": "cpu",
        "env": GymConfig(id="busy"),
        "network": MlpConfig(hidden=(512, 512)),
        "actor": ActorConfig(envs=8, unroll=8),
        "learner": LearnerConfig(batch_size=128, train_period=period, learning_starts=1_000),
    })  # fmt: skip
