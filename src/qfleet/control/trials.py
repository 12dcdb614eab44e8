"""Judges changes to a run by its speed before and after, and remembers what is not to be tried again soon."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean

from qfleet.control.levers import Key, Proposal
from qfleet.control.sights import Span
from qfleet.core.types import Orders

LOSS, GAIN = 0.95, 1.05
"""A change is taken back if the run is slower than the first share of what it was; some must reach the second."""
PATIENCE_S = 60.0
"""A trial that could not be compared for so long is given up, and the change stays."""
ALIKE = 0.3
"""Spans are compared if the evaluator's share of the time differs by less."""
BARRED_S, LONGER, TRIES = 120.0, 4.0, 5
"""What failed is not tried again for so long; each time the wait is longer so many times, and at last it is for good.
"""


@dataclass(frozen=True)
class Trial:
    """A change that is not judged yet."""

    proposal: Proposal
    before: Orders
    """The orders that it replaced."""
    rate: float
    """Environment steps a second before it,"""
    own: float
    """and those of the actor that it is about."""
    evaluating: float
    learning: bool
    began: float

    def comparable(self, span: Span) -> bool:
        """Return whether what happened besides is about the same as before the change."""
        return abs(evaluating(span) - self.evaluating) < ALIKE and learning(span) == self.learning

    def failed(self, span: Span) -> bool:
        """Return whether the speed with the change says that it is to be taken back."""
        gained = {
            "": True,
            "run": span.rate >= self.rate * GAIN,
            "actor": own_rate(span, self.proposal) >= self.own * GAIN,
        }
        return span.rate < self.rate * LOSS or not gained[self.proposal.must_gain]

    def effect(self, span: Span) -> str:
        """Return what came of the change, in words."""
        run = f"{self.rate:,.0f} -> {span.rate:,.0f} steps/s"
        own = f", that actor {self.own:,.0f} -> {own_rate(span, self.proposal):,.0f}"
        return run + (own if self.proposal.must_gain == "actor" else "")


def own_rate(span: Span, proposal: Proposal) -> float:
    """Return the environment steps a second of the actor that a change is about; 0 where there is none."""
    return span.grown("actor", "env_steps").get(proposal.index, 0.0) if proposal.role == "actor" else 0.0


def evaluating(span: Span) -> float:
    """Return the share of the time that evaluators worked: they take a core from the others."""
    return sum(span.busy("evaluator").values())


def learning(span: Span) -> bool:
    """Return whether learners worked: what came before is another run."""
    return fmean(span.busy("learner").values() or (0.0,)) > 0.01


@dataclass
class Bars:
    """Which changes are barred until when; each is so a few times only, so that an unchanging run comes to rest."""

    _until: dict[Key, float] = field(default_factory=dict)
    _times: dict[Key, int] = field(default_factory=dict)

    def barred(self, key: Key, now: float) -> bool:
        """Return whether a change must not be tried now."""
        return now < self._until.get(key, -math.inf)

    def bar(self, key: Key, now: float) -> None:
        """Let a change rest for a while, if it does not already."""
        if not self.barred(key, now):
            times = self._times[key] = self._times.get(key, 0) + 1
            self._until[key] = math.inf if times >= TRIES else now + BARRED_S * LONGER ** (times - 1)
