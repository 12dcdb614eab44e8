"""Brings an experiment to life for seconds and counts who works how long, and what comes of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import psutil
import torch

from qfleet.core.errors import QfleetError
from qfleet.core.protocols import Counter, Placement
from qfleet.experiment import Experiment

WARM_UPDATES = 8
WARM_S = 4.0
"""An arrangement runs until it has made so many updates, or some and for so long, before it is timed."""
GIVE_UP_S = 15.0
"""One that has learned nothing by then is given up."""


@dataclass(frozen=True)
class Rig:
    """An experiment brought to life, to be timed."""

    placement: Placement
    env_steps: Counter
    updates: Counter


@dataclass(frozen=True)
class Round:
    """Some seconds of a rig: who worked how long, and what came of it."""

    actor: float
    replay: float
    learner: float
    cpu: float
    """Processor time of all together, threads and child processes included."""
    steps: int
    updates: int

    @property
    def wall(self) -> float:
        """Seconds of all together, who take turns."""
        return self.actor + self.replay + self.learner

    def __add__(self, other: Round) -> Round:
        """Return both rounds as one."""
        return Round(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


Build = Callable[[Experiment], Rig]


@contextmanager
def running(build: Build, experiment: Experiment) -> Iterator[Rig]:
    """Bring an experiment to life, and let it run until it learns at full speed."""
    threads = torch.get_num_threads()
    rig = build(experiment)
    try:
        began = time.perf_counter()
        while (updates := rig.updates.total()) < WARM_UPDATES:
            rig.placement.advance()
            spent = time.perf_counter() - began
            if spent > WARM_S and updates:
                break
            if spent > GIVE_UP_S:
                raise QfleetError(f"nothing was learned in {GIVE_UP_S:.0f} s of play: the run cannot be planned")
        yield rig
    finally:
        rig.placement.close()
        torch.set_num_threads(threads)


def play(rig: Rig, seconds: float, on_gpu: bool) -> Round:
    """Return some seconds of a rig inline, long enough for a tick and two updates unless there are none for long."""
    busy, cpu, steps, updates = _busy(rig), _cpu_seconds(), rig.env_steps.total(), rig.updates.total()
    began, spent = time.perf_counter(), 0.0
    while spent < seconds or (spent < WARM_S and (rig.updates.total() < updates + 2 or rig.env_steps.total() == steps)):
        rig.placement.advance()
        if on_gpu:
            torch.cuda.synchronize()
        spent = time.perf_counter() - began
    by_kind = {kind: total - busy[kind] for kind, total in _busy(rig).items()}
    actor, replay, learner = (by_kind.get(kind, 0.0) for kind in ("actor", "replay", "learner"))
    if on_gpu:  # what a GPU still computes after a learner's step has returned is the learner's too
        learner = max(learner, spent - actor - replay)
    made, learned = rig.env_steps.total() - steps, rig.updates.total() - updates
    return Round(actor, replay, learner, _cpu_seconds() - cpu, made, learned)


def play_beside(rig: Rig, seconds: float) -> Round:
    """Return what some seconds of a rig in processes made, and the processor time that they took."""
    steps, updates, cpu = rig.env_steps.total(), rig.updates.total(), _cpu_seconds()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or rig.env_steps.total() == steps:
        rig.placement.advance()
    made, learned = rig.env_steps.total() - steps, rig.updates.total() - updates
    return Round(0.0, 0.0, 0.0, _cpu_seconds() - cpu, made, learned)


def core_share(seconds: float) -> float:
    """Return the share of a core that a loop without pauses gets: less than 1 where other programs want it too."""
    began, spent, wall = time.perf_counter(), time.thread_time(), 0.0
    while wall < seconds:
        wall = time.perf_counter() - began
    return min(1.0, (time.thread_time() - spent) / wall)


def _busy(rig: Rig) -> dict[str, float]:
    return {report.kind: report.busy_s for report in rig.placement.reports()}


def _cpu_seconds() -> float:
    """Return the processor time of this process and its children so far."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total
