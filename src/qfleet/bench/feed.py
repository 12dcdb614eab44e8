"""A learner that other processes feed through real streams: updates a second, and how busy its GPU is meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from qfleet.accel.config import AccelConfig
from qfleet.algo.torsos import NatureConfig
from qfleet.bench.nature import ACTIONS, AGENT, OPTIM, SPEC
from qfleet.core.protocols import Receiver, Sender
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.spec import PLAIN
from qfleet.core.types import Batch, Priorities
from qfleet.core.usercode import UserCode
from qfleet.roles.learner import Learner, LearnerHandles
from qfleet.roles.learner_setup import LearnerConfig, LearnerSetup
from qfleet.runtime.graph import Graph
from qfleet.runtime.processes import ProcessPlacement

PREFETCH = 3
"""Batches on their way from each source, as in a run."""
COMPILING_S = 600.0
"""How long the learner's first steps may take."""
_VARIETY = 4
"""Different batches of one source."""


@dataclass(frozen=True)
class Feeding:
    """What is measured."""

    device: str
    batch: int
    ahead: bool
    """Whether the learner works ahead of its device, or waits for every update."""
    sources: int = 4
    """Processes that send batches: one alone is slower than a GPU."""
    warmup: int = 50
    timed: int = 300
    profiled: int = 50
    """Updates of the three parts."""

    @property
    def updates(self) -> int:
        """Updates of all parts; what the learner is asked to do."""
        return self.warmup + self.timed + self.profiled


@dataclass(frozen=True)
class SourceHandles:
    """What a source sees."""

    batches: Sender[Batch]
    priorities: Receiver[Priorities]


class BatchSource(Role):
    """Sends batches of noise as fast as they are taken, and drops the priorities."""

    kind = "batch_source"

    def __init__(self, setup: tuple[Feeding, int], handles: SourceHandles) -> None:
        """Be one source of several, by number."""
        (self._feeding, number), self._handles = setup, handles
        self._left = len(range(number, self._feeding.updates, self._feeding.sources))
        self._batches = [random_batch(self._feeding.batch, number, seed) for seed in range(_VARIETY)]

    def step(self) -> Status:
        """Send one batch if it fits."""
        while self._handles.priorities.receive() is not None:
            pass
        if not self._left:
            self._handles.batches.close()
            return DONE
        if not self._handles.batches.ready():
            return Idle("room", (self._handles.batches, self._handles.priorities))
        self._handles.batches.send(self._batches[self._left % _VARIETY])
        self._left -= 1
        return WORKED

    def state_dict(self) -> State:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing."""


class TimedLearner(Learner):
    """A learner that knows when it began to be measured."""

    def __init__(self, setup: tuple[Feeding, LearnerSetup], handles: LearnerHandles) -> None:
        self._feeding, own = setup
        super().__init__(own, handles)
        self._began, self._seconds = 0.0, 0.0
        self._profiler: Any = None
        self._busy: dict[str, float] = {}

    def step(self) -> Status:
        """Do a learner's step; between two parts wait for the device and read the clock."""
        status, feeding = super().step(), self._feeding
        if not self._began and self._batches_seen >= feeding.warmup:
            self._began = self._now()
        elif self._began and not self._seconds and self._batches_seen >= feeding.warmup + feeding.timed:
            self._seconds = self._now() - self._began
            if feeding.device == "cuda":
                self._profiler = profile(activities=[ProfilerActivity.CUDA])
                self._profiler.start()
        elif self._profiler is not None and not self._busy and self._batches_seen >= feeding.updates:
            self._now()
            self._profiler.stop()
            self._busy = busy(self._profiler.events(), feeding.profiled * batch_bytes(feeding.batch))
        return status

    def _now(self) -> float:
        if self._feeding.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def metrics(self) -> Mapping[str, float]:
        """Return the rate of the timed updates, and where the device's time went in the profiled ones."""
        rate = self._feeding.timed / self._seconds if self._seconds else 0.0
        return {**super().metrics(), "updates_per_s": rate, **self._busy}


def measure(feeding: Feeding) -> dict[str, float]:
    """Run a learner and its sources in processes of their own; return what the learner measured."""
    graph = Graph()
    streams = []
    for number in range(feeding.sources):
        outlet, inlet = graph.stream(f"batches-{number}", PREFETCH, views=True)
        written, read = graph.stream(f"priorities-{number}", PREFETCH + 2, views=True)
        graph.add(BatchSource, (feeding, number), SourceHandles(outlet, read))
        streams.append((inlet, written))
    handles = LearnerHandles(
        batches=tuple(inlet for inlet, _ in streams),
        priorities=tuple(written for _, written in streams),
        weights=graph.publisher("weights"),
        models=None,
        events=None,
        score=graph.subscriber("score"),
        env_steps=graph.counter("env_steps"),
        updates=graph.counter("updates"),
    )
    graph.add(TimedLearner, (feeding, _setup(feeding)), handles)
    spawned = (Learner.kind,) if feeding.device == "cuda" else ()
    placement = ProcessPlacement(graph, spawn=spawned, stall=COMPILING_S)
    try:
        while not placement.done:
            placement.advance()
        return next(dict(report.metrics) for report in placement.reports() if report.kind == Learner.kind)
    finally:
        placement.close()


def _setup(feeding: Feeding) -> LearnerSetup:
    return LearnerSetup(
        learner=LearnerConfig(batch_size=feeding.batch),
        network=NatureConfig(),
        agent=AGENT,
        optim=OPTIM,
        spec=SPEC,
        seed=0,
        total_updates=feeding.updates,
        evaluate_every=1,
        env_steps=1,
        device=feeding.device,
        group=None,
        warm_start=None,
        warm_start_part="all",
        code=UserCode(),
        accel=AccelConfig(),
        ahead=feeding.ahead,
    )


def random_batch(size: int, shard: int, seed: int) -> Batch:
    """Return transitions of noise, as from one shard."""
    rng = np.random.default_rng([shard, seed])
    frames = rng.integers(256, size=(2, size, *SPEC.observations[PLAIN].shape), dtype=np.uint8)
    return Batch(
        observation={PLAIN: frames[0]},
        action=rng.integers(ACTIONS, size=size),
        reward=rng.normal(size=size).astype(np.float32),
        discount=np.full(size, 0.99, np.float32),
        next_observation={PLAIN: frames[1]},
        weight=rng.uniform(0.5, 1, size).astype(np.float32),
        index=np.arange(size),
        generation=np.zeros(size, np.int64),
        global_size=size,
        shard=shard,
    )


def batch_bytes(size: int) -> int:
    """Return how many bytes of frames go up with one batch."""
    return 2 * size * int(np.prod(SPEC.observations[PLAIN].shape))


def busy(events: Any, uploaded: int) -> dict[str, float]:
    """Return the shares of a profile's time in which kernels ran, or anything, and the GB/s of the copies up."""
    work = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if event.device_type.name == "CUDA"
    ]
    whole = max(end for _, end, _ in work) - min(start for start, _, _ in work)
    kernels = [(start, end) for start, end, name in work if not name.startswith(("Memcpy", "Memset"))]
    up = sum(end - start for start, end, name in work if name.startswith("Memcpy HtoD"))
    return {
        "kernels_busy": covered(kernels) / whole,
        "device_busy": covered([(start, end) for start, end, _ in work]) / whole,
        "upload_gb_per_s": uploaded / up / 1e3 if up else 0.0,
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one of the spans (start, end) lasts."""
    total, reached = 0.0, -np.inf
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return float(total)
