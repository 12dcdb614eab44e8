"""Pong as it is planned for this machine: how busy its cores are and, where there is a GPU, that and the emulators."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete

from qfleet.bench.pace import Pace, measure_pace
from qfleet.bench.table import Row
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment, with_changes
from qfleet.planning import apply_plan, plan_run
from qfleet.presets import preset
from qfleet.roles.inference_server import AdaptiveInference, LocalInference, ServedInference

CORES, RAW, GPU = 0.9, 0.9, 0.85
RARELY = {"learner.train_period": 200.0, "learner.learning_starts": 2_000, "replay.capacity": 200_000}
"""Few steps are learned from: sampling is what holds such a run up."""
OFTEN = {"learner.train_period": 1.0, "learner.learning_starts": 2_000, "replay.capacity": 200_000}
"""An update for each step: learning is."""
USUALLY = {"learner.learning_starts": 2_000, "replay.capacity": 200_000}
AT_ONCE = {**USUALLY, "learner.batch_size": 256, "learner.train_period": 32.0}
"""As many samples for each step as usually, in an eighth of the updates."""
RAW_GAMES = 128
_RAW_S, _SECONDS, _LOOK_S = 4.0, 12.0, 0.5


def measure(seconds: float = _SECONDS) -> list[Row]:
    """Run each plan for some seconds."""
    rows = [_cores(planned(RARELY, seconds))]
    if torch.cuda.is_available():
        rows += [_raw(USUALLY, seconds), _raw(AT_ONCE, seconds), _gpu(seconds)]
    return rows


def planned(changes: Mapping[str, Any], seconds: float) -> Pace:
    """Return the pace of Pong with these settings, arranged as it is planned here."""
    experiment = with_changes(preset("atari:pong"), {"placement": "processes", **changes})
    plan = plan_run(experiment, UserCode(), {"placement"}, say=lambda text: None)
    return measure_pace(settled(apply_plan(experiment, plan)), UserCode(), seconds)


def settled(experiment: Experiment) -> Experiment:
    """Return a run that nobody balances while its pace is measured: all actors act, and inference stays where it is."""
    inference, experiment = experiment.inference, with_changes(experiment, {"spare_actors": 0})
    if not isinstance(inference, AdaptiveInference):
        return experiment
    shared = inference.model_dump(exclude={"kind", "begins"})
    if inference.begins == "local":
        stays: Any = LocalInference(precision=inference.precision)
    else:
        stays = ServedInference(**shared)
    return with_changes(experiment, {"inference": stays})


def raw_rate(seconds: float = _RAW_S) -> float:
    """Return the steps a second of ale-py's vector alone, on all cores, with random actions."""
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv("pong", RAW_GAMES, num_threads=0, repeat_action_probability=0.25, noop_max=0)
    rng = np.random.default_rng(0)
    assert isinstance(env.single_action_space, Discrete)
    with contextlib.closing(env):
        env.reset()
        ticks, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            env.step(rng.integers(env.single_action_space.n, size=RAW_GAMES))
            ticks += 1
    return ticks * RAW_GAMES / spent


def _cores(pace: Pace) -> Row:
    return Row(
        what="Pong as planned, one update of 32 in 200 steps: share of the time that the cores work",
        ours="unknown" if pace.cores_busy is None else f"{pace.cores_busy:.0%}",
        goal=f"at least {CORES:.0%}",
        met=None if pace.cores_busy is None else pace.cores_busy >= CORES,
    )


def _raw(changes: Mapping[str, Any], seconds: float) -> Row:
    before = raw_rate()
    ours = planned(changes, seconds).steps_per_s
    raw = (before + raw_rate()) / 2
    learner = with_changes(preset("atari:pong"), changes).learner
    return Row(
        what=f"Pong as planned, one update of {learner.batch_size} in {learner.train_period:g} steps,"
        " beside the games alone on all cores",
        ours=f"{ours:,.0f} steps/s",
        peer=f"{raw:,.0f} steps/s (ale-py's vector of {RAW_GAMES})",
        ratio=ours / raw,
        goal=f"ratio {RAW}",
        met=ours / raw >= RAW,
    )


def _gpu(seconds: float) -> Row:
    with watched_gpu() as looks:
        pace = planned(OFTEN, seconds)
    shares = [share for at, share in looks if pace.began <= at <= pace.ended]
    share = statistics.median(shares) if shares else None
    return Row(
        what="Pong as planned, one update of 32 for each step: share of the time that the GPU works",
        ours="unknown" if share is None else f"{share:.0%}",
        goal=f"at least {GPU:.0%}",
        met=None if share is None else share >= GPU,
    )


@contextmanager
def watched_gpu() -> Iterator[list[tuple[float, float]]]:
    """Yield a list that grows by when `nvidia-smi` was asked and which share of the time it says the GPU works.

    Without it the list stays empty.
    """
    looks: list[tuple[float, float]] = []
    over = threading.Event()

    def look() -> None:
        words = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--id=0"]
        while not over.wait(_LOOK_S):
            with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
                said = subprocess.run(words, capture_output=True, check=True, timeout=5).stdout
                looks.append((time.perf_counter(), float(said) / 100))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield looks
    finally:
        over.set()
        watcher.join()
