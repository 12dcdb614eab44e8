"""Watches the load of a run's roles and says what would relieve it; nothing is moved yet, decisions are only logged.

The policy is a function of what was seen in the last seconds and of what was said before. A straggler is named once and
again only after it had recovered; other advice is given once in a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal

from qfleet.core.protocols import Report

LOOK_S = 0.5
"""Seconds between two looks."""
WINDOW_S = 4.0
"""Rates are taken over so many seconds: whoever falls behind is named within five."""
SLOW, RECOVERED = 0.5, 0.7
"""An actor below the first share of the others' median rate is a straggler until it is above the second."""
BUSY, WAITING = 0.95, 0.4
"""One more actor is advised where actors work the first share of the time or more, the learner waits the second,"""
SPARE_CORES = 1.0
"""and so many cores are idle."""
COOL_DOWN_S = 300.0
"""Advice of one kind is not repeated sooner."""


@dataclass(frozen=True)
class Sight:
    """One role at one moment, counted from its start."""

    busy_s: float
    steps: float | None
    """Environment steps, of an actor."""
    idle: str
    """What it waits for; empty when it works."""


@dataclass(frozen=True)
class Look:
    """All roles that run, at one moment."""

    at: float
    roles: Mapping[tuple[str, int], Sight]
    """By kind and index."""


@dataclass(frozen=True)
class Decision:
    """What the balancer would do, and why."""

    kind: Literal["straggler", "recovered", "more_actors"]
    role: str
    index: int
    reason: str


@dataclass(frozen=True)
class Said:
    """What was decided before."""

    stragglers: frozenset[int] = frozenset()
    """Actors that are named as such."""
    advised_at: float = float("-inf")


def look(now: float, reports: Sequence[Report]) -> Look:
    """Return how the roles stand now; those that are starting, or do something long, are left out."""
    running = [report for report in reports if report.phase == "running"]
    return Look(now, {(r.kind, r.index): Sight(r.busy_s, r.metrics.get("env_steps"), r.idle) for r in running})


def decide(looks: Sequence[Look], cores: float, said: Said) -> tuple[list[Decision], Said]:
    """Return what is to be done now, and what was said by then; `looks` are those of the last `WINDOW_S` seconds."""
    if not looks or looks[-1].at - looks[0].at < WINDOW_S:
        return [], said
    changes, stragglers = _stragglers(looks, said.stragglers)
    advice = _advice(looks, cores) if looks[-1].at - said.advised_at >= COOL_DOWN_S else []
    return changes + advice, Said(stragglers, looks[-1].at if advice else said.advised_at)


def _stragglers(looks: Sequence[Look], before: frozenset[int]) -> tuple[list[Decision], frozenset[int]]:
    """Return who fell behind or caught up, and who is behind now."""
    first, last = looks[0], looks[-1]
    rates = {}
    for (kind, index), sight in last.roles.items():
        earlier = first.roles.get((kind, index))
        if kind == "actor" and earlier is not None and sight.steps is not None and earlier.steps is not None:
            rates[index] = (sight.steps - earlier.steps) / (last.at - first.at)
    usual = median(rates.values()) if len(rates) > 1 else 0.0
    if usual <= 0:
        return [], before & rates.keys()
    decisions, behind = [], set()
    for index, rate in sorted(rates.items()):
        share = rate / usual
        if share < (RECOVERED if index in before else SLOW):
            behind.add(index)
        if index in behind - before:
            why = last.roles["actor", index].idle or "its own work"
            reason = f"{rate:,.0f} steps/s, {share:.0%} of the others' median; held up by: {why}"
            decisions.append(Decision("straggler", "actor", index, reason))
        elif index in before - behind:
            decisions.append(Decision("recovered", "actor", index, f"{share:.0%} of the others' median again"))
    return decisions, frozenset(behind)


def _advice(looks: Sequence[Look], cores: float) -> list[Decision]:
    """Return that one more actor would help, where actors hold the learner up and cores are free."""
    first, last = looks[0], looks[-1]
    busy: dict[str, list[float]] = {}
    for (kind, index), sight in last.roles.items():
        if (earlier := first.roles.get((kind, index))) is not None:
            busy.setdefault(kind, []).append((sight.busy_s - earlier.busy_s) / (last.at - first.at))
    free = cores - sum(sum(shares) for shares in busy.values())
    if "actor" not in busy or "learner" not in busy or free < SPARE_CORES:
        return []
    actors, learner = fmean(busy["actor"]), fmean(busy["learner"])
    if actors < BUSY or learner > 1 - WAITING:
        return []
    reason = (
        f"actors work {actors:.0%} of the time, the learner waits {1 - learner:.0%}, {free:.1f} cores are free:"
        f" --actors {len(busy['actor']) + 1} would be faster"
    )
    return [Decision("more_actors", "actor", len(busy["actor"]), reason)]


@dataclass
class Balancer:
    """Remembers what the policy needs of the last seconds."""

    cores: float
    _looks: list[Look] = field(default_factory=list)
    _said: Said = Said()

    def observe(self, now: float, reports: Sequence[Report]) -> list[Decision]:
        """Take a look if it is time for one, and return what was decided; `now` is in seconds."""
        if self._looks and now - self._looks[-1].at < LOOK_S:
            return []
        self._looks.append(look(now, reports))
        while len(self._looks) > 2 and now - self._looks[1].at >= WINDOW_S:
            del self._looks[0]
        decisions, self._said = decide(self._looks, self.cores, self._said)
        return decisions
