"""Finds who falls behind: actors behind the others, and actors one of whose environments holds up its others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from qfleet.control.sights import Look, Span

SLOW, RECOVERED = 0.5, 0.7
"""An actor below the first share of the others' median rate is a straggler until it is above the second."""
LASTING_S = 2.0
"""An environment is slow when it was so for that long, and is no more when none of its actor was for as long."""
COSTLY = 0.1
"""One whose own steps take a smaller share of the time holds up nobody."""
_REMEDY = "--env.vectorisation async --actor.groups 2 would let the others go on without it"


@dataclass(frozen=True)
class Finding:
    """An actor that straggles, or does so no more."""

    kind: Literal["straggler", "recovered"]
    actor: int
    reason: str


class Stragglers:
    """The actors that straggle now."""

    def __init__(self) -> None:
        self._behind: set[int] = set()
        self._uneven: set[int] = set()

    @property
    def actors(self) -> set[int]:
        """All of them, for whatever reason."""
        return self._behind | self._uneven

    def look(self, looks: Sequence[Look], span: Span, envs: int) -> list[Finding]:
        """Note who fell behind or caught up, for each of its environments that act; returns what is new.

        `span` is from the first of these looks to the last; an actor has so many `envs`.
        """
        acting, before, uneven = span.now("actor", "acting_envs", envs), self.actors, self._uneven
        rates = {i: rate / acting[i] for i, rate in span.grown("actor", "env_steps").items() if acting[i]}
        usual = median(rates.values()) if len(rates) > 1 else 0.0
        shares = {index: rate / usual for index, rate in rates.items()} if usual > 0 else {}
        if len(rates) < 2:
            self._behind = set()  # nobody is left to be behind of
        elif shares:
            self._behind = {i for i, share in shares.items() if share < (RECOVERED if i in self._behind else SLOW)}
        late = [one for one in looks if looks[-1].at - one.at <= LASTING_S]
        self._uneven = {i for i, rate in rates.items() if _is_uneven(late, i, rate, i in uneven)}
        found = []
        for index, rate in rates.items():
            if index in self.actors - before:
                steps = f"{rate * acting[index]:,.0f} steps/s"
                found.append(Finding("straggler", index, self._why(span, index, steps, shares)))
            elif index in before - self.actors:
                even = "its environments that act are about equally fast"
                again = f"{shares[index]:.0%} of the others' median again" if index in shares else "no other acts"
                found.append(Finding("recovered", index, even if index in uneven else again))
        return found

    def _why(self, span: Span, index: int, steps: str, shares: Mapping[int, float]) -> str:
        """Say in what way an actor straggles."""
        whys = [steps]
        if index in self._behind:
            waits = span.waits_for("actor", index) or "its own work"
            whys = [f"{steps}, {shares[index]:.0%} of the others' median for each environment; held up by: {waits}"]
        if index in self._uneven:
            whys.append(_slow_ones(span, index))
        return "; ".join(whys)


def _is_uneven(looks: Sequence[Look], index: int, rate: float, before: bool) -> bool:
    """Return whether an environment of an actor is slow, always the same one, which costs the actor time.

    `rate` is the actor's steps a second for each environment. An actor that was uneven `before` stays so until none of
    its environments was slow in any look.
    """
    there = [one.roles["actor", index].metrics for one in looks if ("actor", index) in one.roles]
    slow = [metrics.get("slow_env") for metrics in there]
    if before:
        return any(env is not None for env in slow)
    return slow[0] is not None and len(set(slow)) == 1 and there[-1]["slow_s"] * rate >= COSTLY


def _slow_ones(span: Span, index: int) -> str:
    """Name the slow environments of an actor, and what would help where they cannot rest by themselves."""
    count, first, took, usual, acting, together = (
        span.now("actor", name, 0.0).get(index, 0.0)
        for name in ("slow_envs", "slow_env", "slow_s", "usual_s", "acting_envs", "envs_together")
    )
    who = f"its environment {first:.0f} of {acting:.0f} takes"
    if count > 1:
        who = f"{count:.0f} of its {acting:.0f} environments, {first:.0f} the first of them, take"
    words = f"{who} {took / max(usual, 1e-9):.0f} times as long as the fastest quarter"
    return f"{words}: {_REMEDY}" if together >= acting else words
