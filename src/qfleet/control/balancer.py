"""Watches the load of a run's roles, names who falls behind, and shares the work out anew where that helps.

One change is made at a time. It is judged by the run's speed some seconds later: kept, or taken back and not tried
again for a long while; what was kept is not undone for as long. So a run whose load does not change comes to rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qfleet.control import levers
from qfleet.control.levers import Proposal, Situation
from qfleet.control.sights import Look, Span, look
from qfleet.control.stragglers import Stragglers
from qfleet.control.trials import PATIENCE_S, Bars, Trial, evaluating, learning, own_rate
from qfleet.core.protocols import Report
from qfleet.core.types import Orders

LOOK_S = 0.5
"""Seconds between two looks."""
WINDOW_S = 3.5
"""Rates are taken over so many seconds: whoever falls behind is named within five."""
NEWEST_S = 1.0
"""The run's speed before a straggler is relieved is that of so many last seconds: it was faster before."""
SETTLE_S = 1.0
"""Nothing is looked at for so long after a change."""
CALM_S = 10.0
"""Seconds between the judgement of a change and the next one; a straggler does not wait for that."""
LONG_S = 30.0
"""An actor is put to sleep when it was one too many for so long."""
ADVICE_S = 300.0
"""Advice is not repeated sooner."""
UNDISTURBED = ("relieve", "return", "local", "served")
"""Changes whose trial ends before a straggler is relieved: who falls behind may do so because of them."""


@dataclass(frozen=True)
class Decision:
    """What the balancer found or did, and why."""

    kind: Literal["straggler", "recovered", "more_actors", "kept", "taken_back"] | levers.Change
    role: str
    index: int
    reason: str
    applied: bool = False
    """Whether it changed the orders."""
    before: float | None = None
    """Environment steps a second of the run before a change,"""
    after: float | None = None
    """and with it, once that is known."""
    because: str = ""
    """Of a judgement: why the change was made."""
    inference: Literal["", "local", "served"] = ""
    """Of a move of inference: who computes for the actors now."""


@dataclass(frozen=True)
class Fleet:
    """What can be shared out."""

    cores: float
    actors: int = 1
    """Actors that begin awake."""
    spare: int = 0
    """Those that begin asleep."""
    vacant: int = 0
    """Those that may join, and then are awake."""
    envs: int = 1
    """Environments of each actor."""
    deadlines_ms: tuple[float, ...] = ()
    """Of the inference servers."""
    begins: Literal["local", "served"] | None = None
    """Whom actors ask at first that can ask servers or networks of their own; None where they cannot do both."""
    fixed: bool = False
    """Whether nothing can be changed: the balancer then only says what it sees."""

    def orders(self) -> Orders:
        """Return the orders that a run begins with."""
        asked = () if self.begins == "local" else self.deadlines_ms
        return Orders((self.envs,) * self.actors + (0,) * self.spare + (self.envs,) * self.vacant, asked)


class Balancer:
    """Sees a run through its reports and gives orders."""

    def __init__(self, fleet: Fleet, orders: Orders | None = None) -> None:
        """Begin with the fleet's own orders, or with those of an earlier part of the run."""
        self.orders = orders or fleet.orders()
        self._fleet = fleet
        self._looks: list[Look] = []
        self._stragglers = Stragglers()
        self._eased = {actor for actor, count in enumerate(self.orders.envs) if 0 < count < fleet.envs}
        """Actors that were relieved at some time."""
        self._trial: Trial | None = None
        self._bars = Bars()
        self._calm_until = self._advised_until = self._blind_until = float("-inf")
        self._crowded_since: float | None = None

    def observe(self, now: float, env_steps: int, reports: Sequence[Report]) -> list[Decision]:
        """Take a look if it is time for one, and return what was decided; `now` is in seconds."""
        if now < self._blind_until or (self._looks and now - self._looks[-1].at < LOOK_S):
            return []
        self._looks.append(look(now, env_steps, reports))
        while len(self._looks) > 2 and now - self._looks[1].at >= WINDOW_S:
            del self._looks[0]
        span = Span(self._looks[0], self._looks[-1])
        if span.seconds < WINDOW_S:
            return []
        found = self._stragglers.look(self._looks, span, self._fleet.envs)
        named = [Decision(one.kind, "actor", one.actor, one.reason) for one in found]
        seen = Situation(
            span, self.orders, self._fleet.envs, self._fleet.cores, self._stragglers.actors | self._relieved
        )
        if self._fleet.fixed:
            return named + self._advise(now, seen)
        return named + (self._relieve(now, seen) or self._judge(now, span) or self._improve(now, seen))

    def regrouped(self, now: float) -> list[Decision]:
        """Note that other actors or learners are there now: what is on trial cannot be judged any more."""
        self._looks, self._blind_until = [], now + SETTLE_S
        return self._unjudged(now) if self._trial is not None else []

    def stood_still(self) -> None:
        """Forget the last seconds: the run stood still, which is nobody's fault."""
        self._looks = []

    @property
    def _relieved(self) -> set[int]:
        """Former stragglers some of whose environments still rest."""
        return {actor for actor in self._eased if self.orders.envs[actor] < self._fleet.envs}

    # ------------------------------------------------------------------ what is done

    def _relieve(self, now: float, seen: Situation) -> list[Decision]:
        """Relieve a straggler at once; another change that is on trial then stays without a judgement."""
        if self._trial is not None and self._trial.proposal.key[0] in UNDISTURBED:
            return []
        for actor in sorted(self._stragglers.actors):
            if not self._bars.barred(("relieve", actor), now):
                proposal = levers.relieve(seen, actor)
                if proposal is not None:
                    newest = next(one for one in reversed(self._looks) if now - one.at >= NEWEST_S)
                    ended = self._unjudged(now) if self._trial else []
                    return [*ended, self._carry_out(now, seen.span, proposal, Span(newest, self._looks[-1]))]
        return []

    def _improve(self, now: float, seen: Situation) -> list[Decision]:
        """Make the first change that may help and is not barred; else say what would."""
        crowded = levers.has_too_many_actors(seen)
        self._crowded_since = (self._crowded_since or now) if crowded else None
        if self._trial is not None or now < self._calm_until:
            return []
        proposals = [levers.give_back(seen, actor) for actor in sorted(self._relieved - self._stragglers.actors)]
        proposals += [p for p in (levers.wake(seen),) if p is not None]
        if self._crowded_since is not None and now - self._crowded_since >= LONG_S:
            proposals += [p for p in (levers.let_sleep(seen),) if p is not None]
        for server in range(len(self.orders.deadlines_ms)):
            proposals += [p for p in (levers.set_deadline(seen, server),) if p is not None]
        if self._fleet.begins is not None:
            proposals += [p for p in (levers.move_inference(seen, self._fleet.deadlines_ms),) if p is not None]
        for proposal in proposals:
            if not self._bars.barred(proposal.key, now):
                return [self._carry_out(now, seen.span, proposal, seen.span)]
        return self._advise(now, seen)

    def _advise(self, now: float, seen: Situation) -> list[Decision]:
        """Say that one more actor would help, where none sleeps."""
        why = levers.short_of_actors(seen)
        if not why or now < self._advised_until or min(self.orders.envs) < self._fleet.envs:
            return []
        self._advised_until = now + ADVICE_S
        more = len(self.orders.envs) + 1
        return [Decision("more_actors", "actor", more - 1, f"{why}: --actors {more} would be faster")]

    def _carry_out(self, now: float, span: Span, proposal: Proposal, before: Span) -> Decision:
        """Give a proposal's orders, to be judged by the speed in `before` and by what else happened in `span`."""
        rate, own = before.rate, own_rate(before, proposal)
        self._trial = Trial(proposal, self.orders, rate, own, evaluating(span), learning(span), now)
        self._give(now, proposal.orders)
        if proposal.key[0] == "relieve":
            self._eased.add(proposal.index)
        return Decision(
            proposal.kind,
            proposal.role,
            proposal.index,
            proposal.reason,
            applied=True,
            before=rate,
            inference=self._side(self._trial),
        )

    def _give(self, now: float, orders: Orders) -> None:
        self.orders = orders
        self._looks, self._blind_until = [], now + SETTLE_S

    # ------------------------------------------------------------------ what came of it

    def _judge(self, now: float, span: Span) -> list[Decision]:
        """Keep the change that is on trial, or take it back, once the run's speed can be compared."""
        trial = self._trial
        if trial is None:
            return []
        if not trial.comparable(span):
            return self._unjudged(now) if now - trial.began >= PATIENCE_S else []
        proposal = trial.proposal
        again = proposal.kind == "return" and proposal.index in self._stragglers.actors
        failed = again or trial.failed(span)
        self._trial, self._calm_until = None, now + CALM_S
        self._bars.bar(proposal.key if failed else proposal.opposite, now)
        if failed:
            self._give(now, trial.before)
        why = "it fell behind again" if again else trial.effect(span)
        return [self._outcome("taken_back" if failed else "kept", trial, why, span.rate)]

    def _unjudged(self, now: float) -> list[Decision]:
        """Let the change that is on trial stay without a judgement."""
        trial = self._trial
        assert trial is not None
        self._trial, self._calm_until = None, now + CALM_S
        self._bars.bar(trial.proposal.opposite, now)
        return [self._outcome("kept", trial, "the run's load changed meanwhile: its effect is not known", None)]

    def _outcome(self, kind: Literal["kept", "taken_back"], trial: Trial, why: str, rate: float | None) -> Decision:
        proposal = trial.proposal
        return Decision(
            kind,
            proposal.role,
            proposal.index,
            f"{proposal.kind}: {why}",
            applied=kind == "taken_back",
            before=trial.rate,
            after=rate,
            because=proposal.reason,
            inference=self._side(trial),
        )

    def _side(self, trial: Trial) -> Literal["", "local", "served"]:
        """Return who computes for the actors now, of a change that moved that."""
        if trial.before.served == trial.proposal.orders.served:
            return ""
        return "served" if self.orders.served else "local"
