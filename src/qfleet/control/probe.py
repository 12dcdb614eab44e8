"""Times candidate settings of a fused run on this machine; only those that compute the same gradient can win."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qfleet.accel.graphs import WARMUPS
from qfleet.accel.hardware import Hardware, look
from qfleet.accel.precision import set_matrix_format
from qfleet.accel.table import Settings
from qfleet.algo.agent import ReplayAgent
from qfleet.control.candidates import candidates, format_put_back, plainness, with_settings
from qfleet.control.gradient_check import TOLERANCE, difference, gradient_of, sample_data
from qfleet.core.errors import QfleetError
from qfleet.core.tensors import TensorBatch
from qfleet.roles.fused.loop import Loop
from qfleet.roles.fused.replay_loop import ReplayLoop
from qfleet.roles.fused.rollout_loop import RolloutLoop
from qfleet.roles.fused.setup import FusedSetup

LIMIT_S = 180.0
"""A probe takes no longer, but for the candidate that it is at."""
CHECKING = 0.3
"""Share of the time after which no further candidate is checked."""
STARTING = 0.6
"""Share after which none is started."""
SUGGESTING = 0.85
"""Share after which no further suggestion is tried."""
ROUNDS = 5
"""Each candidate is timed so many times, in turn with the others: a busy moment of the machine hits all of them."""
ALIKE = 0.03
"""What is slower than the fastest by less counts as fast as it: rounds of one candidate differ by as much."""
FACTORS = (4, 16)
"""Numbers of environments that are tried as suggestions, as multiples of the run's."""
MOST_ENVS = 65_536
"""What a run may have at most."""
MOST_PIECES = 1000
"""Pieces of a loop after which one that learns nothing is given up."""
ROWS = 50_000
"""A probe's replay is no larger: several lie in memory at once."""


@dataclass
class Candidate:
    """Settings and what came of them."""

    settings: Settings
    difference: float = float("nan")
    """Of its gradient from the eager float32 one, as a part of that one's length."""
    start_s: float = float("nan")
    """Seconds until the loop ran at full speed: building, compiling, recording."""
    rates: list[float] = field(default_factory=list)
    """Learned steps a second of each round."""
    failure: str = ""
    """Why it is out; empty if it is not."""

    @property
    def rate(self) -> float:
        """Learned steps a second, the median of the rounds; 0 without any."""
        return statistics.median(self.rates) if self.rates else 0.0


@dataclass(frozen=True)
class Suggestion:
    """A change that would be faster or slower but is the user's to make."""

    change: str
    rate: float


@dataclass
class Report:
    """All candidates, the first of which is the eager float32 one, and what else was tried."""

    hardware: Hardware
    candidates: list[Candidate]
    suggestions: list[Suggestion] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    """What there was no time for."""

    @property
    def winner(self) -> Candidate | None:
        """The fastest that computes the same gradient, the plainest of those about as fast; None if none was timed."""
        timed = [candidate for candidate in self.candidates if candidate.rates and not candidate.failure]
        best = max((candidate.rate for candidate in timed), default=0.0)
        alike = [candidate for candidate in timed if candidate.rate >= (1 - ALIKE) * best]
        return min(alike, key=lambda candidate: plainness(candidate.settings), default=None)


@dataclass
class Clock:
    """What is left of a probe's time."""

    limit_s: float
    now: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._began = self.now()

    def past(self, share: float = 1.0) -> bool:
        """Return whether this share of the time is over."""
        return self.now() - self._began > share * self.limit_s


def probe(setup: FusedSetup, seconds: float, clock: Clock, say: Callable[[str], object]) -> Report:
    """Return what came of all candidates, each timed for about so many seconds; `say` is told what is being done."""
    small = _small(setup)
    report = Report(look(torch.device(setup.device)), [Candidate(settings) for settings in candidates(small)])
    _check_all(report, small, clock, say)
    _time_all(_start_all(report, small, clock, say), seconds, clock)
    _forget(report)
    _suggest(report, small, seconds, clock, say)
    return report


def _small(setup: FusedSetup) -> FusedSetup:
    """Return the setup with a small replay that is learned from at once, no end, and no evaluations."""
    rows = min(setup.replay.capacity, max(ROWS, 64 * setup.actor.envs))
    starts = min(setup.learner.learning_starts, setup.learner.batch_size)
    return replace(
        setup,
        replay=setup.replay.replace(capacity=rows),
        learner=setup.learner.replace(learning_starts=starts),
        evaluation=setup.evaluation.replace(every=2**60),
        env_steps=2**60,
        warm_start=None,
    )


def _check_all(report: Report, setup: FusedSetup, clock: Clock, say: Callable[[str], object]) -> None:
    """Compute every candidate's gradient on the same data; those that differ by more than their format allows fail."""
    data = sample_data(setup)
    eager: Tensor | None = None
    for candidate in report.candidates:
        settings = candidate.settings
        if clock.past(CHECKING):
            candidate.failure = "not tried for lack of time"
            continue
        say(f"checking {settings.words(report.hardware.kind)}")
        with _failing(candidate), format_put_back():
            eager = _check(candidate, with_settings(setup, settings), data, eager)
    if eager is None:
        for candidate in report.candidates:
            candidate.failure = candidate.failure or "the eager gradient to compare with failed"
    _forget(report)


def _check(candidate: Candidate, setup: FusedSetup, data: TensorBatch, eager: Tensor | None) -> Tensor:
    """Compare a candidate's gradient with the eager one; without one, it is the eager one. Return the eager one."""
    gradient = gradient_of(setup, data)
    eager = gradient if eager is None else eager
    candidate.difference, allowed = difference(gradient, eager), TOLERANCE[candidate.settings.precision]
    if not candidate.difference <= allowed:  # NaN is not
        candidate.failure = f"its gradient differs by {candidate.difference:.1e}, more than {allowed:.0e}"
    return eager


def _start_all(
    report: Report, setup: FusedSetup, clock: Clock, say: Callable[[str], object]
) -> list[tuple[Candidate, Loop]]:
    """Return the loops of all candidates that are still in, each run until it is at full speed."""
    started = []
    for candidate in report.candidates:
        if candidate.failure:
            continue
        if clock.past(STARTING):
            candidate.failure = "not tried for lack of time"
            continue
        say(f"starting {candidate.settings.words(report.hardware.kind)}")
        with _failing(candidate):
            began = time.perf_counter()
            started.append((candidate, _warm_loop(with_settings(setup, candidate.settings))))
            candidate.start_s = time.perf_counter() - began
    say(f"timing {len(started)} candidates")
    return started


def _time_all(started: list[tuple[Candidate, Loop]], seconds: float, clock: Clock) -> None:
    """Time the loops in turn, for about so many seconds each; out of time, those that have no round yet get one."""
    for _ in range(ROUNDS):
        for candidate, loop in started:
            if not candidate.failure and not (candidate.rates and clock.past()):
                with _failing(candidate):
                    candidate.rates.append(_rate(loop, seconds / ROUNDS))


def _warm_loop(setup: FusedSetup) -> Loop:
    """Return a loop that has learned, compiled and recorded what it will."""
    loop: Loop = ReplayLoop(setup) if isinstance(setup.agent, ReplayAgent) else RolloutLoop(setup)
    left = WARMUPS + 2 if loop.choices.recorded else 1
    for _ in range(MOST_PIECES):
        left -= loop.advance().updates > 0
        if not left:
            return loop
    raise QfleetError(f"it learned nothing in {MOST_PIECES} pieces")


def _rate(loop: Loop, seconds: float) -> float:
    """Return the learned steps a second of one round, of one piece at least. Every piece waits for the device."""
    with format_put_back():
        if loop.device.type != "cpu":
            set_matrix_format(loop.choices.settings.precision)
        steps, began, spent = 0, time.perf_counter(), 0.0
        while spent < seconds or not steps:
            steps += loop.advance().steps
            spent = time.perf_counter() - began
    return steps / spent


def _suggest(report: Report, setup: FusedSetup, seconds: float, clock: Clock, say: Callable[[str], object]) -> None:
    """Time the winner with more environments, and on a CPU with all cores: these change what a run computes."""
    winner, envs = report.winner, setup.actor.envs
    if winner is None:
        return
    changes = {
        f"--actor.envs {envs * factor}": (replace(setup, actor=setup.actor.replace(envs=envs * factor)), 0)
        for factor in FACTORS
        if envs * factor <= MOST_ENVS
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if report.hardware.kind == "cpu" and cores != torch.get_num_threads():
        changes[f"--threads {cores}"] = (setup, cores)
    for change, (changed, threads) in changes.items():
        if clock.past(SUGGESTING):
            report.untried.append(change)
            continue
        say(f"timing {change}")
        one = Candidate(winner.settings)
        with _failing(one), _threads(threads):
            one.rates.append(_rate(_warm_loop(with_settings(changed, winner.settings)), seconds))
            report.suggestions.append(Suggestion(change, one.rate))
        if one.failure:
            report.untried.append(f"{change} ({one.failure})")
        _forget(report)


@contextmanager
def _failing(candidate: Candidate) -> Iterator[None]:
    """Turn what goes wrong into the reason why the candidate is out."""
    try:
        yield
    except Exception as error:  # out of memory, a compiler's error: whatever it is, the others go on
        lines = str(error).strip().splitlines() or [""]
        candidate.failure = f"{type(error).__name__}: {lines[0]}"[:160]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many threads meanwhile; 0 changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _forget(report: Report) -> None:
    """Give memory back, and forget compiled code: torch.compile keeps only a few versions of one function."""
    gc.collect()
    if any(candidate.settings.compile for candidate in report.candidates):
        torch.compiler.reset()
    if report.hardware.kind == "cuda":
        torch.cuda.empty_cache()
