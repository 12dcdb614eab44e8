"""What the edges between processes cost: frames and weights a second, and the share of the CPU time of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from qfleet.algo.flat import checksum
from qfleet.bench.table import Row
from qfleet.core.protocols import Publisher, Receiver, Report, Sender, Subscriber
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.spec import PLAIN
from qfleet.core.types import Experience, Version, Weights
from qfleet.runtime.graph import Graph
from qfleet.runtime.processes import ProcessPlacement

FRAME_GB_PER_S, REFRESH_MS, MESSAGE_SHARE = 1.0, 5.0, 0.05
STEPS_PER_S = 10_000
FRAME = (84, 84)
UNROLL, ENVS = 16, 8
"""Steps and environments of one message of frames: 0.9 MB."""
WEIGHTS = 7_000_000 // 4
_STORED = 8
"""Messages that the receiver's store holds."""
_WARMUP, _MESSAGES, _REFRESHES, _PACED_S, _ROUNDS = 50, 2_000, 100, 3.0, 3


def measure() -> list[Row]:
    """Time the edges of the placement `processes`, each between two processes."""
    gigabytes, refresh = frames_gb_per_s(), refresh_ms()
    share = statistics.median(message_share() for _ in range(_ROUNDS))
    return [
        Row(
            what=f"frames from one process to another, {UNROLL} x {ENVS} of 84 x 84 a message, stored by the receiver",
            ours=f"{gigabytes:.2f} GB/s",
            goal=f"at least {FRAME_GB_PER_S} GB/s",
            met=gigabytes >= FRAME_GB_PER_S,
        ),
        Row(
            what="weights of 7 MB, from before they are published to after they are copied (median)",
            ours=f"{refresh:.1f} ms",
            goal=f"under {REFRESH_MS} ms",
            met=refresh < REFRESH_MS,
        ),
        Row(
            what=f"messages, slots and supervisor at {STEPS_PER_S} steps/s of frames, share of the CPU time of all",
            ours=f"{share:.1%}",
            goal=f"under {MESSAGE_SHARE:.0%}",
            met=share < MESSAGE_SHARE,
        ),
    ]


def frames_gb_per_s() -> float:
    """Return how fast frames go from a process that has them to one that copies them into its store."""
    report = _run_stream(Settings(messages=_WARMUP + _MESSAGES))["sink"]
    return report.metrics["gigabytes"] / report.metrics["seconds"]


def message_share() -> float:
    """Return which share of the CPU time of all processes is neither the sender's acting nor the receiver's storing.

    The sender is as busy as an actor is at this pace: one that slept would pay for falling asleep, too.
    """
    pace = UNROLL * ENVS / STEPS_PER_S
    reports = _run_stream(Settings(messages=int(_PACED_S / pace), pace_s=pace))
    used = sum(report.metrics["cpu_s"] for report in reports.values())
    return 1 - sum(report.metrics.get("own_s", 0.0) for report in reports.values()) / used


def refresh_ms() -> float:
    """Return the median time from a learner's weights to an actor's, checked on arrival."""
    graph = Graph()
    settings = Settings(messages=_REFRESHES, pace_s=0.03)
    graph.add(WeightSource, settings, Handles(publisher=graph.publisher("weights")))
    graph.add(WeightSink, settings, Handles(subscriber=graph.subscriber("weights", views=True)))
    with _finished(graph) as reports:
        return reports["weight_sink"].metrics["median_ms"]


@dataclass(frozen=True)
class Settings:
    """How much is sent."""

    messages: int
    pace_s: float = 0.0
    """Seconds between two messages; 0 for as many as fit."""


@dataclass(frozen=True)
class Handles:
    """What a role of this benchmark sees."""

    outlet: Sender[Any] | None = None
    inlet: Receiver[Any] | None = None
    publisher: Publisher[Any] | None = None
    subscriber: Subscriber[Any] | None = None


class _Measured(Role):
    """Counts messages and its own CPU time; is never saved."""

    def __init__(self, settings: Settings, handles: Handles) -> None:
        self._settings, self._handles = settings, handles
        self._count = 0
        self._own_s = 0.0
        self._cpu_began: float | None = None
        self._began: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return the CPU time since the first step, and the part of it that is the role's own work."""
        cpu = 0.0 if self._cpu_began is None else time.process_time() - self._cpu_began
        return {"cpu_s": cpu, "own_s": self._own_s}

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        """Count the CPU time of what is done in here as the role's own."""
        began = time.thread_time()
        yield
        self._own_s += time.thread_time() - began

    def state_dict(self) -> State:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing."""

    def _begin(self) -> None:
        if self._began is None:
            self._cpu_began, self._began = time.process_time(), time.perf_counter()

    def _next_at(self) -> float:
        """Return the seconds until the next message is due."""
        assert self._began is not None
        return self._began + self._count * self._settings.pace_s - time.perf_counter()


class Source(_Measured):
    """Sends messages of frames; where it has a pace it acts in between, which here is to use the time up."""

    kind = "source"

    def __init__(self, settings: Settings, handles: Handles) -> None:
        super().__init__(settings, handles)
        self._message = experience()

    def step(self) -> Status:
        """Send one message when it is due and fits."""
        self._begin()
        outlet = self._handles.outlet
        assert outlet is not None
        if self._count == self._settings.messages:
            outlet.close()
            return DONE
        if not outlet.ready():
            return Idle("room", (outlet,))
        if self._settings.pace_s:
            with self._own_work():
                until = time.thread_time() + self._settings.pace_s
                self._message = experience()
                while time.thread_time() < until:
                    pass
        outlet.send(self._message)
        self._count += 1
        return WORKED


class Sink(_Measured):
    """Copies frames into a store, as a replay shard does."""

    kind = "sink"

    def __init__(self, settings: Settings, handles: Handles) -> None:
        super().__init__(settings, handles)
        self._store = np.concatenate([experience().observation[PLAIN]] * _STORED)
        self._measured_from = self._seconds = 0.0

    def step(self) -> Status:
        """Store one message."""
        self._begin()
        inlet = self._handles.inlet
        assert inlet is not None
        message = inlet.receive()
        if message is None:
            return DONE if inlet.exhausted() else Idle("input", (inlet,))
        place = self._count % _STORED * UNROLL * ENVS
        with self._own_work():
            self._store[place : place + UNROLL * ENVS] = message.observation[PLAIN]
        self._count += 1
        if self._count == _WARMUP:
            self._measured_from = time.perf_counter()
        self._seconds = time.perf_counter() - self._measured_from
        return WORKED

    def metrics(self) -> dict[str, float]:
        """Return how much came after the warm-up, and in what time."""
        gigabytes = max(self._count - _WARMUP, 0) * self._store.nbytes / _STORED / 1e9
        return {**super().metrics(), "gigabytes": gigabytes, "seconds": self._seconds}


class WeightSource(_Measured):
    """Publishes weights that say when they were made."""

    kind = "weight_source"

    def __init__(self, settings: Settings, handles: Handles) -> None:
        super().__init__(settings, handles)
        self._flat = np.random.default_rng(0).standard_normal(WEIGHTS).astype(np.float32)

    def step(self) -> Status:
        """Publish once if it is due."""
        self._begin()
        assert self._handles.publisher is not None
        if self._count == self._settings.messages:
            return DONE
        if (wait := self._next_at()) > 0:
            return Idle("pace", deadline=wait)
        began = time.monotonic_ns()
        self._count += 1
        values = self._flat.copy()
        self._handles.publisher.publish(Weights(Version(0, self._count), values, checksum(values), env_steps=began))
        return WORKED


class WeightSink(_Measured):
    """Copies every new set of weights into its own."""

    kind = "weight_sink"

    def __init__(self, settings: Settings, handles: Handles) -> None:
        super().__init__(settings, handles)
        self._flat = np.zeros(WEIGHTS, np.float32)
        self._took: list[float] = []

    def step(self) -> Status:
        """Take over weights if there are new ones."""
        assert self._handles.subscriber is not None
        weights = self._handles.subscriber.latest()
        if weights is None:
            return Idle("news", deadline=0.001)
        assert checksum(weights.flat) == weights.checksum
        np.copyto(self._flat, weights.flat)
        self._took.append(1e-6 * (time.monotonic_ns() - weights.env_steps))
        return DONE if weights.version.number == self._settings.messages else WORKED

    def metrics(self) -> dict[str, float]:
        """Return the median, without the first quarter."""
        took = self._took[self._settings.messages // 4 :] or [0.0]
        return {**super().metrics(), "median_ms": statistics.median(took)}


def experience() -> Experience:
    """Return what an actor of ENVS environments sends after UNROLL ticks."""
    rows = UNROLL * ENVS
    return Experience(
        source="source-0",
        sequence=0,
        version=Version(),
        offsets=np.arange(0, rows + 1, ENVS),
        stream=np.tile(np.arange(ENVS), UNROLL),
        observation={PLAIN: np.ones((rows, *FRAME), np.uint8)},
        action=np.zeros(rows, np.int64),
        reward=np.zeros(rows, np.float32),
        terminated=np.zeros(rows, np.bool_),
        truncated=np.zeros(rows, np.bool_),
        final=np.zeros(rows, np.bool_),
    )


def _run_stream(settings: Settings) -> dict[str, Report]:
    graph = Graph()
    outlet, inlet = graph.stream("frames", 3, views=True)
    graph.add(Source, settings, Handles(outlet=outlet))
    graph.add(Sink, settings, Handles(inlet=inlet))
    with _finished(graph) as reports:
        return reports


@contextmanager
def _finished(graph: Graph) -> Iterator[dict[str, Report]]:
    """Run a graph to its end; yields the reports by kind, this process's own as "supervisor"."""
    placement = ProcessPlacement(graph)
    try:
        began = time.process_time()
        while not placement.done:
            placement.advance()
        supervisor = Report("supervisor", 0, "running", {"cpu_s": time.process_time() - began}, 0.0, {})
        yield {report.kind: report for report in [*placement.reports(), supervisor]}
    finally:
        placement.close()
