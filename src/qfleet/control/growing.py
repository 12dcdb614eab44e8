"""Joins the elastic policy to a run: machines, reports and wishes go in, comings, goings and events come out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from qfleet.control import levers
from qfleet.control.elastic import Change, Elastic, Limits, NodeSight, Sight, Wish
from qfleet.control.levers import Situation
from qfleet.control.retries import LONGEST_S, Retries
from qfleet.control.sights import Look, Span, look
from qfleet.core.protocols import Machine, Report, Scalable
from qfleet.core.types import Orders
from qfleet.experiment import Experiment
from qfleet.observe.text import counted
from qfleet.roles.actor import NO_ROOM, Actor
from qfleet.roles.learner import NO_BATCH, Learner
from qfleet.roles.replay_shard import ReplayShard

LOOK_S = 1.0
"""Seconds between two looks, unless somebody wishes something."""
WINDOW_S = 5.0
"""Rates are taken over so many seconds."""
PATIENCE_S = 10.0
"""A wish that has waited for so long, whatever for, is not waited for by the next one."""
MOVE = "move"
"""The name of moves off a node among what is tried again: other changes of the role that fail do not delay them."""
KINDS = (Actor.kind, Learner.kind, ReplayShard.kind)
"""Those whose numbers change."""
Event = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A wish that somebody waits for the answer to, under this id."""

    id: str
    wish: Wish


class Growing:
    """The elastic policy of one run, and what carries its decisions out."""

    def __init__(self, experiment: Experiment, placement: Scalable) -> None:
        self._experiment, self._placement = experiment, placement
        actors, learners, shards = (len(placement.present(kind)) for kind in KINDS)
        elastic = experiment.elastic
        limits = Limits(
            min_actors=elastic.min_actors,
            max_actors=experiment.seats,
            min_learners=1 if experiment.regroupable else learners,
            max_learners=experiment.rank_seats if experiment.regroupable else learners,
            settle_s=elastic.settle_s,
            automatic=elastic.automatic == "on",
            max_shards=experiment.replay_parts,
        )
        self._policy = Elastic(limits, actors, learners, shards)
        self._asked: deque[Request] = deque()
        self._pending: Request | None = None
        self._looks: list[Look] = []
        self._next = float("-inf")
        self._retries = Retries()
        self._hindered: dict[str, str] = {}
        """By role, or `MOVE`, why it could not be changed when that was last tried; empty where it could."""
        self._taken_at = float("-inf")
        """When the pending wish was taken over."""
        self._told = False
        """Whether it was said that the pending wish waits."""

    def ask(self, request: Mapping[str, Any]) -> bool:
        """Take in a request (id, by, actors, learners, shards) from another thread; what is none is left out.

        Returns that it was heard.
        """
        numbers = {name: request.get(name) for name in ("actors", "learners", "shards")}
        if all(number is None or type(number) is int for number in numbers.values()):
            self._asked.append(Request(str(request.get("id", "")), Wish(str(request.get("by", "")), **numbers)))
        return True

    def presence(self) -> tuple[list[int], int, int]:
        """Return which actors, how many learner ranks and how many shards the run should have when it is resumed."""
        present = self._placement.present
        return present(Actor.kind), self._policy.learners, len(present(ReplayShard.kind))

    def look(self, now: float, env_steps: int, reports: Sequence[Report]) -> list[Event]:
        """Let the policy look if it is time to; returns events of what was done."""
        events = self._heed(now)
        if now < self._next and self._pending is None:
            return events
        self._next = now + LOOK_S
        for change in self._policy.decide(self._sight(now, env_steps, reports)):
            if self._retries.due(_trial(change), now):
                events += self._carry_out(change, now)
        return events + self._answer()

    def stood_still(self) -> None:
        """Forget the last seconds: the run stood still, which is nobody's fault."""
        self._looks = []

    def _heed(self, now: float) -> list[Event]:
        """Take over the next wish, if none is being met; returns a refusal where it cannot be met.

        One that must wait, or has waited, does not keep others waiting: it is answered, and holds as far as they leave
        it.
        """
        waited = self._told or now - self._taken_at >= PATIENCE_S
        if not self._asked or (self._pending is not None and not waited):
            return []
        request = self._asked.popleft()
        if reason := self._policy.refusal(request.wish):
            return [self._answered(request, False, reason)]
        events = []
        if (former := self._pending) is not None:
            told = f"not done yet, and {request.wish.by} has asked for something since"
            why = self._waits(former.wish)
            events.append(self._answered(former, False, f"{told}: {why}" if why else told))
        self._policy.take(request.wish)
        self._pending, self._taken_at, self._told = request, now, False
        self._hindered, self._retries = {}, Retries()
        return events

    def _answer(self) -> list[Event]:
        """Say that a wish is met, once it is, and once that it must wait."""
        request = self._pending
        if request is None:
            return []
        actors, learners, shards = (len(self._placement.present(kind)) for kind in KINDS)
        wish = request.wish
        if (
            wish.actors not in (None, actors)
            or wish.learners not in (None, learners)
            or wish.shards not in (None, shards)
        ):
            if self._told or not (why := self._waits(wish)):
                return []
            self._told = True
            text = f"{why}; it is tried again, after {LONGEST_S:.0f} s at the latest"
            return [{"event": "waiting", "request": request.id, "by": wish.by, "text": text}]
        self._pending = None
        return [self._answered(request, True, _in_words(actors, learners, shards))]

    def _waits(self, wish: Wish) -> str:
        """Return which of a wish's numbers must wait, and why."""
        wanted = {"actor": wish.actors, "learner": wish.learners, "shard": wish.shards}
        hindered = {role: self._hindered.get(role) for role, number in wanted.items() if number is not None}
        return "; ".join(f"{role}s {wanted[role]} must wait: {why}" for role, why in hindered.items() if why)

    def _answered(self, request: Request, applied: bool, text: str) -> Event:
        return {"event": "scaled", "request": request.id, "by": request.wish.by, "applied": applied, "text": text}

    # ------------------------------------------------------------------ what is seen

    def _sight(self, now: float, env_steps: int, reports: Sequence[Report]) -> Sight:
        machines = self._placement.machines()
        shards = len(self._placement.present(ReplayShard.kind))
        others = [one for one in reports if one.kind != Actor.kind and one.host is None]
        homes = [self._placement.home(f"{report.kind}-{report.index}") for report in others]
        actors = [self._placement.home(f"actor-{index}") for index in self._placement.present(Actor.kind)]
        there = self._placement.present(Learner.kind) if self._experiment.regroupable else []
        ranks = [self._placement.home(f"learner-{index}") for index in there]
        nodes = [
            NodeSight(
                one.id,
                one.name,
                one.cores,
                actors.count(one.id),
                homes.count(one.id),
                one.draining,
                ranks.count(one.id),
            )
            for one in machines
        ]
        resting = frozenset(name for name in ("learner", MOVE) if not self._retries.due(name, now))
        sight = Sight(now, nodes, len(self._placement.present(Learner.kind)), shards=shards, resting=resting)
        return self._with_rates(sight, env_steps, reports, machines)

    def _with_rates(
        self, sight: Sight, env_steps: int, reports: Sequence[Report], machines: Sequence[Machine]
    ) -> Sight:
        """Return a sight that also says who holds up whom; shards are on the first of the machines."""
        now = sight.at
        self._looks.append(look(now, env_steps, reports))
        while len(self._looks) > 2 and now - self._looks[1].at >= WINDOW_S:
            del self._looks[0]
        span = Span(self._looks[0], self._looks[-1])
        if span.seconds < WINDOW_S or not machines:
            return sight
        envs = self._experiment.actor.envs
        seen = Situation(span, Orders((envs,) * self._experiment.seats), envs, sum(one.cores for one in machines))
        waiting = fmean(span.waits(Actor.kind, NO_ROOM).values() or (0.0,))
        return replace(
            sight,
            short=levers.short_of_actors(seen),
            saturated=waiting >= levers.WAITING,
            congested=levers.short_of_shards(seen, sight.shards, self._free_cores(span, reports, machines[0])),
        )

    def _free_cores(self, span: Span, reports: Sequence[Report], machine: Machine) -> float:
        """Return how many cores of a machine no role keeps busy."""
        there = [one for one in reports if self._placement.home(f"{one.kind}-{one.index}") == machine.id]
        return machine.cores - sum(span.cores(one.kind).get(one.index, 0.0) for one in there)

    # ------------------------------------------------------------------ what is done

    def _carry_out(self, change: Change, now: float) -> list[Event]:
        name = next((one.name for one in self._placement.machines() if one.id == change.node), "")
        began, hindrance, after = time.perf_counter(), "", change.after
        if change.role == "actor":
            after = self._less(change) if change.after < change.before else self._more(change)
            stuck = after == change.before and self._placement.absent(Actor.kind)  # none are still leaving
            hindrance = "they have come to their end, or their machine can have no more" if stuck else ""
        elif change.role == "learner":
            hindrance = self._placement.regroup(Learner.kind, change.after, NO_BATCH)
        else:
            hindrance = self._placement.share(ReplayShard.kind, change.after)
        seconds = time.perf_counter() - began
        self.stood_still()
        trial = _trial(change)
        self._hindered[trial] = hindrance
        if not hindrance:
            self._retries.forget(trial)
        elif change.role != "actor":  # who comes makes nobody stand still
            self._retries.failed(trial, now + seconds)
        return [] if hindrance or after == change.before else [_event(change, name, after, seconds)]

    def _less(self, change: Change) -> int:
        there = [i for i in self._placement.present(Actor.kind) if self._placement.home(f"actor-{i}") == change.node]
        self._placement.go(Actor.kind, there[change.after :])
        return change.after

    def _more(self, change: Change) -> int:
        coming = self._placement.absent(Actor.kind)[: change.after - change.before]
        if not coming:  # all seats are those of actors that are still leaving
            return change.before
        came = self._placement.come(Actor.kind, coming, change.node)
        return change.before + len(coming) * came


def _trial(change: Change) -> str:
    """Return under which name a change is tried again."""
    return MOVE if change.role == "learner" and change.after == change.before else change.role


def _in_words(actors: int, learners: int, shards: int) -> str:
    return ", ".join((counted(actors, "actor"), counted(learners, "learner"), counted(shards, "shard")))


def _event(change: Change, node: str, after: int, seconds: float) -> Event:
    counts = {"before": change.before, "after": after, "seconds": seconds}
    return {"event": "elastic", "what": f"{change.role}s", "node": node, **counts, "text": change.reason}
