"""What the balancer sees of a run: all roles at one moment, and what they did between two moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qfleet.core.protocols import Report
from qfleet.roles.actor import IN_ENVS

AT_WORK = ("running", IN_ENVS)
"""Phases in which a role's speed says something; others are starting, or do something long."""


@dataclass(frozen=True)
class Sight:
    """One role at one moment, counted from its start."""

    busy_s: float
    idle_s: Mapping[str, float]
    """Seconds idle, by reason."""
    idle: str
    """What it waits for; empty when it works."""
    metrics: Mapping[str, float]
    cpu_s: float = 0.0
    """Processor time, all threads included."""
    guest: bool = False
    """Whether it is in the process of another one, whose processor time has its own."""


@dataclass(frozen=True)
class Look:
    """The run at one moment, in seconds."""

    at: float
    env_steps: int
    roles: Mapping[tuple[str, int], Sight]
    """Those at work, by kind and index."""


def look(now: float, env_steps: int, reports: Sequence[Report]) -> Look:
    """Return how the run stands now."""
    at_work = [report for report in reports if report.phase in AT_WORK]
    seen = {
        (r.kind, r.index): Sight(r.busy_s, r.idle_s, r.waits_for, r.metrics, r.cpu_s, r.host is not None)
        for r in at_work
    }
    return Look(now, env_steps, seen)


class Span:
    """What happened between two looks, of the roles that are in both and were not begun anew in between."""

    def __init__(self, first: Look, last: Look) -> None:
        self._first, self._last = first, last
        self.seconds = last.at - first.at
        self._pairs: dict[str, list[tuple[int, Sight, Sight]]] = {}

    @property
    def rate(self) -> float:
        """Environment steps a second of the whole run."""
        return (self._last.env_steps - self._first.env_steps) / self.seconds

    def busy(self, kind: str) -> dict[int, float]:
        """Return the share of the time that each role of a kind worked."""
        return {index: (now.busy_s - then.busy_s) / self.seconds for index, then, now in self._of(kind)}

    def cores(self, kind: str) -> dict[int, float]:
        """Return how many cores each role of a kind kept busy; a role that works is taken to need one for that time."""
        used = {index: (now.cpu_s - then.cpu_s) / self.seconds for index, then, now in self._of(kind)}
        guests = {index for index, _, now in self._of(kind) if now.guest}
        return {index: 0.0 if index in guests else max(share, used[index]) for index, share in self.busy(kind).items()}

    def waits(self, kind: str, reason: str) -> dict[int, float]:
        """Return the share of the time that each role of a kind waited for that reason."""
        return {
            index: (now.idle_s.get(reason, 0.0) - then.idle_s.get(reason, 0.0)) / self.seconds
            for index, then, now in self._of(kind)
        }

    def grown(self, kind: str, metric: str) -> dict[int, float]:
        """Return by how much a metric of each role of a kind grew a second, where there is one."""
        return {
            index: (now.metrics[metric] - then.metrics[metric]) / self.seconds
            for index, then, now in self._of(kind)
            if metric in then.metrics and metric in now.metrics
        }

    def now(self, kind: str, metric: str, otherwise: float) -> dict[int, float]:
        """Return a metric of each role of a kind at the end."""
        return {index: now.metrics.get(metric, otherwise) for index, _, now in self._of(kind)}

    def waits_for(self, kind: str, index: int) -> str:
        """Return what a role waits for at the end; empty when it works."""
        return self._last.roles[kind, index].idle

    def _of(self, kind: str) -> list[tuple[int, Sight, Sight]]:
        """Return each role of a kind as it was first and last."""
        if kind not in self._pairs:
            self._pairs[kind] = [
                (index, then, now)
                for (key, index), now in sorted(self._last.roles.items(), key=lambda role: role[0])
                if key == kind and (then := self._first.roles.get((key, index))) and now.busy_s >= then.busy_s
            ]
        return self._pairs[kind]
