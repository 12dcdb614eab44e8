"""Which share of its time a GPU works that a run in processes feeds, told without one; prints a table.

    python benchmarks/made_up_gpu.py [PRESET] [--us 140 300] [--draws 1 4 16] [--actors 1] [--envs 16] [--every 1]
        [--seconds 5] [--turns 3]

All is real but the device: actors, replay, streams, weights and evaluations are those of any run, and so is the way in
which the learner works ahead of its device. The device is a clock: an update takes `--us` microseconds of its time, a
copy what its bytes take, and nothing is computed. So the share says what the learner's process and those that feed it
leave the device to wait for. Learning must be what holds the run up, or the share tells of the actors: the last
columns say who waited for whom. The learner's own core does as much as beside a GPU, but for launches and pinned
memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from qfleet.core.protocols import Counter, Placement, Report
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.program import build_program, place
from qfleet.roles import learning
from qfleet.roles.learner import NO_BATCH, Learner
from qfleet.runtime.graph import open_handles

COMPUTING, COPYING = 0, 1
BYTES_PER_S = 20e9
"""What a copy between a machine's memory and its GPU takes."""
WARM_UP = 1000
"""Updates before the first turn."""
UNDISTURBED = {"env_steps": 10**9, "evaluation.every": 10**9, "evaluation.target": None, "balance": "off"}
MIRRORED = {"replay.mirror": "on", "replay.storage.kind": "ram", "replay.capacity": 100_000}


class Moment:
    """A place in a queue of the device: when it will have come past it."""

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        if (left := self.at - time.perf_counter()) > 0:
            time.sleep(left)


class MadeUpGpu:
    """A device that only takes time: two queues, each of which is empty from a certain moment on."""

    def __init__(self) -> None:
        self._ends = [0.0, 0.0]
        self._queue = COMPUTING
        self._ends_of_work = 0.0
        self.worked = 0.0
        """Seconds that updates took or, as far as they are queued, will take."""

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    device = host

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._queue = COPYING
        try:
            yield
        finally:
            self._queue = COMPUTING

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        self.take(target.nbytes / BYTES_PER_S)

    def take(self, seconds: float) -> float:
        """Queue something that takes so long; return when it ends."""
        self._ends[self._queue] = max(self._ends[self._queue], time.perf_counter()) + seconds
        return self._ends[self._queue]

    def update(self, seconds: float) -> None:
        """Queue updates that take so long."""
        self._ends_of_work = self.take(seconds)
        self.worked += seconds

    def busy_s(self) -> float:
        """Return for how many seconds updates were under way until now."""
        return self.worked - max(self._ends_of_work - time.perf_counter(), 0.0)

    def mark(self) -> Moment:
        return Moment(self._ends[self._queue])

    def wait(self, mark: Moment) -> None:
        self._ends[self._queue] = max(self._ends[self._queue], mark.at)


class PacedLearner(Learner):
    """A learner that works ahead of a made-up GPU, on which updates for one batch take so long."""

    def __init__(self, paced: tuple[float, Any], handles: Any) -> None:
        self._update_s, setup = paced
        self._gpu = MadeUpGpu()
        with (
            patch.object(learning, "link_for", lambda setup: self._gpu),
            patch.object(learning, "Recording", self._recorded),
        ):
            super().__init__(setup, handles)

    def _recorded(self, work: Callable[[], object], **how: Any) -> Callable[[], object]:
        """Return what does the work once, so that its results are there, and then only takes its time."""
        done = []

        def run() -> None:
            if not done:
                work()
                done.append(True)
            self._gpu.update(self._update_s)

        return run

    def metrics(self) -> Mapping[str, float]:
        return {**super().metrics(), "device_s": self._gpu.busy_s()}


@dataclass(frozen=True)
class Look:
    """What is known of a run at one moment."""

    at: float
    updates: int
    device_s: float
    starved_s: float
    """Seconds in which the learner had no batch."""


def look(placement: Placement, updates: Counter) -> Look:
    """Look at a run, when its learner has just told how it stands."""
    before = told = _learner(placement)
    while told.metrics is before.metrics:
        placement.advance()
        told = _learner(placement)
    return Look(time.perf_counter(), updates.total(), told.metrics.get("device_s", 0.0), told.idle_s.get(NO_BATCH, 0.0))


def _learner(placement: Placement) -> Report:
    return next(report for report in placement.reports() if report.kind == Learner.kind)


def looks_at(experiment: Experiment, update_s: float, seconds: float, turns: int) -> list[Look]:
    """Return how a run stands at the ends of so many turns, once it is at work."""
    with tempfile.TemporaryDirectory() as folder:
        program = build_program(experiment, env_spec(experiment.env), UserCode(), Path(folder))
        nodes = program.graph.nodes
        at = next(number for number, node in enumerate(nodes) if node.kind == Learner.kind)
        from made_up_gpu import PacedLearner  # by the name by which children import it, who do not run the main module

        nodes[at] = dataclasses.replace(nodes[at], build=PacedLearner, config=(update_s, nodes[at].config))
        placement = place(program, experiment)
        try:
            handles = open_handles(program.monitor, placement.open)
            found = [look(placement, handles.updates)]
            while found[-1].updates < WARM_UP:
                found = [look(placement, handles.updates)]
            for _ in range(turns):
                ends = time.perf_counter() + seconds
                while time.perf_counter() < ends:
                    placement.advance()
                found.append(look(placement, handles.updates))
        finally:
            placement.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="cartpole")
    parser.add_argument("--us", type=float, nargs="+", default=[140.0, 300.0])
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    print("| us an update | updates at once | device busy | learner without a batch | updates/s |")
    print("|---" * 5 + "|")
    for update_us, draws in itertools.product(options.us, options.draws):
        experiment = with_changes(
            preset(options.preset),
            {**UNDISTURBED, "placement": "processes", "topology": "pipeline", "actors": options.actors,
             "actor.envs": options.envs, "learner.train_period": options.every, "learner.updates_per_draw": draws,
             "learner.batch_size": 32, "learner.learning_starts": 2000, **MIRRORED},
        )  # fmt: skip
        looks = looks_at(experiment, update_us * draws / 1e6, options.seconds, options.turns)
        turns = [(late.at - early.at, early, late) for early, late in itertools.pairwise(looks)]
        busy = ", ".join(f"{(late.device_s - early.device_s) / spent:.0%}" for spent, early, late in turns)
        starved = ", ".join(f"{(late.starved_s - early.starved_s) / spent:.0%}" for spent, early, late in turns)
        rate = (looks[-1].updates - looks[0].updates) / (looks[-1].at - looks[0].at)
        print(f"| {update_us:.0f} | {draws} | {busy} | {starved} | {rate:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
