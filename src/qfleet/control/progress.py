"""Turns the roles' reports into one flat record: totals, rates since the last record, and the bottleneck."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from qfleet.algo.agent import ReplayAgent
from qfleet.control.bottleneck import Load, in_turns, side_by_side
from qfleet.control.cores import Cores
from qfleet.core.protocols import LONG_STEP_S, Report
from qfleet.experiment import Experiment
from qfleet.roles.actor import IN_ENVS

_FROM_ACTORS = ("episode_return", "episode_length", "epsilon")
_COUNTED_BY_ACTORS = ("return_sum", "cut_episodes", "given_up_envs", "lost_steps")
_FROM_LEARNER = (
    "loss",
    "td_error",
    "grad_norm",
    "learning_rate",
    "q_mean",
    "policy_lag",
    "policy_lag_mean",
    "skipped_updates",
    "gradient_bytes",
    "weight_bytes",
)
_FROM_REPLAY = ("replay_size", "replay_fill", "samples_per_insert")
_FROM_SERVERS = ("inference_batch", "inference_wait_ms")
_WORK = {"actor": "env_steps", "learner": "updates", "worker": "gradients", "server": "version"}
"""What the speed of a role is counted in, by its kind: one of its metrics."""
_COUNTED = {"actors": ("actor",), "learners": ("learner", "worker", "fused"), "shards": ("replay",)}
"""Which kinds of roles are counted together, by the name of their number; a fused loop is a learner that acts."""
_NAMED = 3
"""So many roles at most are named that are in long steps."""
_AT_WORK = {"running": "in one step", IN_ENVS: IN_ENVS}
"""What a role is in that takes long, by its phase; other phases may."""


class Progress:
    """Remembers the last record, to give rates."""

    def __init__(self, experiment: Experiment, clock: Callable[[], float]) -> None:
        self._budget, self._clock = experiment.env_steps, clock
        replays = isinstance(experiment.agent, ReplayAgent)
        self._learning_starts = experiment.learner.learning_starts if replays else 0
        self._beside = experiment.placement != "inline" and not experiment.lockstep
        self._cores = Cores() if self._beside and experiment.placement == "processes" else None
        self.begin(0, 0)

    def begin(self, env_steps: int, updates: int) -> None:
        """Start measuring rates now."""
        self._last = (self._clock(), env_steps, updates)
        self._busy: dict[str, float] = {}
        self._cpu: dict[str, float] = {}
        self._done: dict[str, float] = {}
        if self._cores is not None:
            self._cores.busy()

    def due(self, every_s: float) -> bool:
        """Return whether the last record is that old."""
        return self._clock() - self._last[0] >= every_s

    def record(self, reports: Sequence[Report], env_steps: int, updates: int, wall_s: float) -> dict[str, Any]:
        """Return the record of now."""
        now, (then, steps_then, updates_then) = self._clock(), self._last
        seconds = max(now - then, 1e-9)
        rate = (env_steps - steps_then) / seconds
        record: dict[str, Any] = {
            "time": time.time(),
            "wall_s": wall_s,
            "env_steps": env_steps,
            "env_steps_budget": self._budget,
            "updates": updates,
            "env_steps_per_s": rate,
            # A death may undo updates: those that were undone are no rate.
            "updates_per_s": max(updates - updates_then, 0) / seconds,
        }
        if rate > 0 or env_steps >= self._budget:
            record["eta_s"] = max(0, self._budget - env_steps) / max(rate, 1e-9)
        record |= _present(reports) | _merged(reports)
        record |= self._shares(reports, seconds)
        if updates == 0 and env_steps < self._learning_starts:
            began = f"none yet: learning begins at {self._learning_starts:,} steps"
            record["bottleneck"] = (_in_one_step(reports) if self._beside else "") + began
            record.pop("eta_s", None)
        self._last = (now, env_steps, updates)
        return record

    def _shares(self, reports: Sequence[Report], seconds: float) -> dict[str, Any]:
        """Return what share of the time each role was busy, how fast it was, and which one holds the others up."""
        record: dict[str, Any] = {}
        shares: dict[str, dict[int, float]] = {}
        cores: dict[str, float] = {}
        for report in reports:
            name = f"{report.kind}.{report.index}"
            busy = min(1.0, max(0.0, (report.busy_s - self._busy.get(name, 0.0)) / seconds))
            self._busy[name] = report.busy_s
            if report.metrics.get("acting_envs") != 0:  # whoever sleeps holds up nobody
                process = report.index if report.host is None else report.host
                shared = shares.setdefault(report.kind, {})
                shared[process] = min(1.0, shared.get(process, 0.0) + busy)
            record |= {f"{name}.busy": busy, f"{name}.idle": report.waits_for}
            if report.queue is not None:
                record[f"{name}.queue"] = report.queue
            if report.cpu_s:
                if name in self._cpu:  # else it has what it took to begin
                    used = max(0.0, report.cpu_s - self._cpu[name]) / seconds
                    record[f"{name}.cores"] = used
                    cores[report.kind] = cores.get(report.kind, 0.0) + used
                self._cpu[name] = report.cpu_s
            if (done := report.metrics.get(_WORK.get(report.kind, ""))) is not None:
                if name in self._done:
                    record[f"{name}.rate"] = max(0.0, done - self._done[name]) / seconds
                self._done[name] = done
        load = self._load(cores)
        if load is not None:
            record["cores_busy"] = load.busy
        if shares:
            by_kind = {kind: list(busy.values()) for kind, busy in shares.items()}
            record["bottleneck"] = (
                _in_one_step(reports) + side_by_side(by_kind, load) if self._beside else in_turns(by_kind)
            )
        return record

    def _load(self, used: dict[str, float]) -> Load | None:
        """Return how busy the machine is whose cores the roles of each kind used; None where there are several."""
        if self._cores is None or (busy := self._cores.busy()) is None:
            return None
        return Load(self._cores.count, busy, used)


def _in_one_step(reports: Sequence[Report]) -> str:
    """Name those whose present step takes long, as that of an environment that hangs: until it ends they seem idle."""
    long = [one for one in reports if one.phase in _AT_WORK and one.step_s >= LONG_STEP_S]
    named = [f"{one.kind}.{one.index} is {_AT_WORK[one.phase]} for {one.step_s:.0f} s" for one in long[:_NAMED]]
    more = [f"{len(long) - _NAMED} more are in one step, too"] if len(long) > _NAMED else []
    return "".join(f"{text}; " for text in [*named, *more])


def _present(reports: Sequence[Report]) -> dict[str, int]:
    """Return how many actors, learners and shards there are; parts of the replay in one process are one shard."""
    kinds = [report.kind for report in reports if report.host is None]
    numbers = {name: sum(map(kinds.count, counted)) for name, counted in _COUNTED.items()}
    return {name: number for name, number in numbers.items() if number}


def _merged(reports: Sequence[Report]) -> dict[str, float]:
    """Return the run's figures from those of its roles: actors weighted by nothing, as their windows are equal."""
    merged: dict[str, float] = {}
    actors = [r.metrics for r in reports if r.kind in ("actor", "fused")]
    merged["episodes"] = sum(m.get("episodes", 0.0) for m in actors)
    for name in _FROM_ACTORS:
        values = [m[name] for m in actors if name in m]
        if values:
            merged[name] = sum(values) / len(values)
    for name in _COUNTED_BY_ACTORS:
        if any(name in m for m in actors):
            merged[name] = sum(m.get(name, 0.0) for m in actors)
    servers = [r.metrics for r in reports if r.kind == "inference" and r.metrics.get("inference_requests")]
    if servers:
        merged |= {name: sum(m[name] for m in servers) / len(servers) for name in _FROM_SERVERS}
    for kind, names in (("learner", _FROM_LEARNER), ("replay", _FROM_REPLAY)):
        kinds = (kind, "fused", "worker") if kind == "learner" else (kind, "fused")
        first = next((r.metrics for r in reports if r.kind in kinds), {})
        merged |= {name: first[name] for name in names if name in first}
    shards = [r.metrics for r in reports if r.kind in ("replay", "fused") and "replay_size" in r.metrics]
    if len(shards) > 1:
        merged["replay_size"] = sum(m["replay_size"] for m in shards)
        merged["replay_fill"] = sum(m["replay_fill"] for m in shards) / len(shards)
    return merged
