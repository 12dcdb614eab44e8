"""Runs an experiment for some seconds without evaluations or checkpoints, and says how fast and how busy it was."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qfleet.control.cores import Cores
from qfleet.core.protocols import Placement, Report
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, with_changes
from qfleet.program import MonitorHandles, build_program, place
from qfleet.runtime.graph import open_handles

_NEVER = {"env_steps": 10**12, "evaluation.every": 10**12, "evaluation.target": None, "balance": "off"}


@dataclass(frozen=True)
class Pace:
    """What a run did in the time that counts."""

    steps_per_s: float
    updates: int
    env_steps: int
    busy_s: Mapping[str, float]
    """Seconds of work by kind of role, over all roles of the kind."""
    idle_s: Mapping[str, float]
    """Seconds of waiting, likewise."""
    cores_busy: float | None = None
    """Share of the time that the machine's cores worked, for whomever; None where nobody counts it."""
    began: float = 0.0
    ended: float = 0.0
    """That time, by `time.perf_counter`."""

    def busy_share(self, kind: str) -> float:
        """Return which share of its time a kind of role worked."""
        return self.busy_s[kind] / max(self.busy_s[kind] + self.idle_s[kind], 1e-9)


def measure_pace(experiment: Experiment, code: UserCode, seconds: float, warm_updates: int = 20) -> Pace:
    """Run an experiment until it has made its first updates, and then for so many seconds, which count."""
    experiment = with_changes(experiment, _NEVER)
    with tempfile.TemporaryDirectory() as directory:
        program = build_program(experiment, env_spec(experiment.env, code.env), code, Path(directory))
        placement = place(program, experiment)
        try:
            handles: MonitorHandles = open_handles(program.monitor, placement.open)
            while handles.updates.total() < warm_updates:
                _advance(placement, handles)
            began, steps, updates = time.perf_counter(), handles.env_steps.total(), handles.updates.total()
            before, cores = placement.reports(), Cores()
            while (spent := time.perf_counter() - began) < seconds:
                _advance(placement, handles)
            made, learned = handles.env_steps.total() - steps, handles.updates.total() - updates
            after, busy = placement.reports(), cores.busy()
        finally:
            placement.close()
    worked, idled = _grown(before, after, _busy_s), _grown(before, after, _idle_s)
    return Pace(made / spent, learned, made, worked, idled, busy, began, began + spent)


def _advance(placement: Placement, handles: MonitorHandles) -> None:
    placement.advance()
    for stream in handles.events:
        while stream.receive() is not None:
            pass


def _busy_s(report: Report) -> float:
    return report.busy_s


def _idle_s(report: Report) -> float:
    return sum(report.idle_s.values())


def _grown(before: list[Report], after: list[Report], value: Callable[[Report], float]) -> dict[str, float]:
    grown: dict[str, float] = {}
    for old, new in zip(before, after, strict=True):
        grown[new.kind] = grown.get(new.kind, 0.0) + value(new) - value(old)
    return grown
