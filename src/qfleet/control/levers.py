"""What the balancer may change in a run, and when that may help: each rule looks at a few seconds and proposes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Literal

from qfleet.control.sights import Span
from qfleet.core.types import Orders
from qfleet.roles.actor import NO_ROOM, UNANSWERED
from qfleet.roles.inference_server import FOR_MORE

BUSY, WAITING = 0.95, 0.4
"""Actors that work the first share of the time while the learner waits the second are too few, and the reverse."""
SPARE_CORES = 1.0
"""So many idle cores are room for one more actor."""
SHARED = 0.8
"""Actors that stay must be able to take over another one's work with so much of their time."""
SLACK, SMALL = 0.1, 0.5
"""Where actors wait less than the first for a server whose batches are smaller than the second, these may be larger."""
DEADLINES_MS = (0.25, 16.0)
"""Between these a server's deadline is moved."""
LEARNING = 0.9
"""A learner that works so much of the time would gain little by faster actors."""

Change = Literal["rest", "move", "return", "wake", "sleep", "deadline"]
Key = tuple[str, int]
"""A change and its opposite have one each, so that what failed is not tried again, and what helped is not undone."""


@dataclass(frozen=True)
class Proposal:
    """Other orders, and why."""

    kind: Change
    role: str
    index: int
    orders: Orders
    reason: str
    key: Key
    opposite: Key
    must_gain: Literal["", "actor", "run"] = ""
    """Who must get faster for it to be kept, because fewer environments act; else the run must not get slower."""


@dataclass(frozen=True)
class Situation:
    """What a rule may look at."""

    span: Span
    orders: Orders
    envs: int
    """Environments of each actor."""
    cores: float
    set_aside: Collection[int] = ()
    """Actors that straggle, or have straggled and not recovered: no work is moved to them."""

    @cached_property
    def awake(self) -> list[int]:
        """Actors that are at work."""
        return [index for index in self.span.busy("actor") if self.orders.envs[index]]

    @cached_property
    def actors_busy(self) -> float:
        """Share of the time that actors at work are busy, on the mean."""
        busy = self.span.busy("actor")
        return fmean(busy[index] for index in self.awake) if self.awake else 0.0

    @cached_property
    def learner_busy(self) -> float:
        """The same of the learners; 1 while none is seen."""
        return fmean(self.span.busy("learner").values() or (1.0,))

    @cached_property
    def free_cores(self) -> float:
        """Cores that no role keeps busy."""
        kinds = ("actor", "replay", "learner", "evaluator", "inference")
        return self.cores - sum(sum(self.span.cores(kind).values()) for kind in kinds)

    def together(self, actor: int) -> int:
        """Return how many environments of an actor rest only together."""
        return int(self.span.now("actor", "envs_together", self.envs).get(actor, self.envs))


def relieve(seen: Situation, actor: int) -> Proposal | None:
    """Let the slow environments of a straggler rest, half of them if none stands out, and others act instead."""
    awake, unit = seen.orders.envs[actor], seen.together(actor)
    slow = int(seen.span.now("actor", "slow_envs", 0.0).get(actor, 0.0))
    less = -(-slow // unit) * unit if 0 < slow < awake else awake // unit // 2 * unit
    less = less if 0 < less < awake else awake
    given = _given(seen, less)
    if not given and less == awake:
        return None
    orders = _with_envs(seen.orders, {actor: awake - less, **given})
    to = ", ".join(f"{count - seen.orders.envs[taker]} by actor {taker}" for taker, count in given.items())
    reason = f"{less} of its {awake} environments rest" + (f"; as many as possible are replaced: {to}" if to else "")
    kind: Change = "move" if given else "rest"
    return Proposal(
        kind, "actor", actor, orders, reason, ("relieve", actor), ("return", actor), "" if given else "actor"
    )


def _given(seen: Situation, wanted: int) -> dict[int, int]:
    """Return who acts for how many environments when `wanted` that rest are woken; those at work come first."""
    given: dict[int, int] = {}
    able = [actor for actor in seen.span.busy("actor") if actor not in seen.set_aside]
    for actor in sorted(able, key=lambda one: (seen.orders.envs[one] == 0, one)):
        awake, unit = seen.orders.envs[actor], seen.together(actor)
        more = min(-(-wanted // unit) * unit, seen.envs - awake)
        if wanted > 0 and more > 0:
            given[actor] = awake + more
            wanted -= more
    return given


def give_back(seen: Situation, actor: int) -> Proposal:
    """Let all environments of a former straggler act again."""
    reason = f"tried again: all {seen.envs} of its environments act, not {seen.orders.envs[actor]}"
    orders = _with_envs(seen.orders, {actor: seen.envs})
    return Proposal("return", "actor", actor, orders, reason, ("return", actor), ("relieve", actor))


def short_of_actors(seen: Situation) -> str:
    """Return in what way actors hold the learner up while cores are free; empty if they do not."""
    if seen.actors_busy < BUSY or seen.learner_busy > 1 - WAITING or seen.free_cores < SPARE_CORES:
        return ""
    return (
        f"actors work {seen.actors_busy:.0%} of the time, the learner waits {1 - seen.learner_busy:.0%},"
        f" {seen.free_cores:.1f} cores are free"
    )


def short_of_shards(seen: Situation, shards: int, free_cores: float) -> str:
    """Return in what way so many shards hold up actors and learner while cores are free for more; empty if not.

    Each shard has every so manieth part of the replay; one that has a single part has none to give to another.
    """
    parts = seen.span.busy("replay")
    busy = {shard: sum(parts[part] for part in parts if part % shards == shard) for shard in range(shards)}
    busiest = max((busy[part % shards] for part in parts if part >= shards), default=0.0)
    waiting = fmean(seen.span.waits("actor", NO_ROOM).values() or (0.0,))
    learner_waits = 1 - seen.learner_busy
    if busiest < BUSY or min(waiting, learner_waits) < WAITING or free_cores < SPARE_CORES:
        return ""
    return (
        f"a shard works {busiest:.0%} of the time, actors wait {waiting:.0%} and the learner {learner_waits:.0%} of it,"
        f" {free_cores:.1f} cores are free"
    )


def wake(seen: Situation) -> Proposal | None:
    """Let one more actor act, or more environments of one, where actors are too few."""
    why = short_of_actors(seen)
    resting = [a for a in seen.span.busy("actor") if seen.orders.envs[a] < seen.envs and a not in seen.set_aside]
    if not why or not resting:
        return None
    orders = _with_envs(seen.orders, {resting[0]: seen.envs})
    return Proposal("wake", "actor", resting[0], orders, why, ("more", 0), ("fewer", 0))


def has_too_many_actors(seen: Situation) -> bool:
    """Return whether the learner lacks a core that one of the actors keeps busy while all of them wait for it."""
    waiting = seen.span.waits("actor", NO_ROOM)
    return (
        len(seen.awake) > 1
        and seen.learner_busy >= BUSY
        and fmean(waiting[actor] for actor in seen.awake) >= WAITING
        and seen.actors_busy * len(seen.awake) <= SHARED * (len(seen.awake) - 1)
        and seen.free_cores < SPARE_CORES
    )


def let_sleep(seen: Situation) -> Proposal | None:
    """Let one actor rest where there are too many."""
    if not has_too_many_actors(seen):
        return None
    last = seen.awake[-1]
    reason = (
        f"the learner works {seen.learner_busy:.0%} of the time, actors {seen.actors_busy:.0%}, and no core is free"
    )
    orders = _with_envs(seen.orders, {last: 0})
    return Proposal("sleep", "actor", last, orders, reason, ("fewer", 0), ("more", 0), must_gain="run")


def set_deadline(seen: Situation, server: int) -> Proposal | None:
    """Halve the deadline of a server that waits for more requests while its actors wait for it, or double it.

    It is doubled where actors hardly wait, the server is busy and its batches are small.
    """
    actors = [a for a in seen.awake if a % len(seen.orders.deadlines_ms) == server]
    present, busy = seen.orders.deadlines_ms[server], seen.span.busy("inference").get(server)
    if not actors or busy is None or not present:
        return None
    unanswered = seen.span.waits("actor", UNANSWERED)
    waits, idle = fmean(unanswered[a] for a in actors), seen.span.waits("inference", FOR_MORE)[server]
    batch = _batch(seen.span, server) / sum(seen.orders.envs[a] for a in actors)
    shorter, longer = max(present / 2, DEADLINES_MS[0]), min(2 * present, DEADLINES_MS[1])
    why = f"actors wait {waits:.0%} of the time for it, it waits {idle:.0%} for more, a batch is {batch:.0%} of them"
    if waits >= WAITING and idle >= 1 - SHARED and shorter < present:
        return _deadline(seen.orders, server, shorter, why, ("shorter", server), ("longer", server))
    if waits <= SLACK and batch < SMALL <= busy and longer > present:
        return _deadline(seen.orders, server, longer, why, ("longer", server), ("shorter", server))
    return None


def move_inference(seen: Situation, deadlines_ms: tuple[float, ...]) -> Proposal | None:
    """Let actors ask servers with these deadlines instead of networks of their own, or the reverse.

    It may help where they hold the learner up and spend much of their time on the network, or on waiting for servers.
    """
    if seen.learner_busy > LEARNING:
        return None
    served, span = seen.orders.served, seen.span
    shares = span.waits("actor", UNANSWERED) if served else span.grown("actor", "network_s")
    share = min(1.0, fmean([shares[actor] for actor in seen.awake if actor in shares] or (0.0,)))
    if share < WAITING:
        return None
    if served:
        reason = f"actors wait {share:.0%} of the time for servers: each asks a network of its own instead"
        orders = dataclasses.replace(seen.orders, deadlines_ms=())
        return Proposal("move", "inference", 0, orders, reason, ("local", 0), ("served", 0), must_gain="run")
    reason = f"actors spend {share:.0%} of the time on their networks: they ask servers instead"
    orders = dataclasses.replace(seen.orders, deadlines_ms=deadlines_ms)
    return Proposal("move", "inference", 0, orders, reason, ("served", 0), ("local", 0), must_gain="run")


def _batch(span: Span, server: int) -> float:
    """Return the mean size of a server's batches, in observations."""
    rows, batches = span.grown("inference", "inference_rows"), span.grown("inference", "inference_batches")
    return rows[server] / batches[server] if batches.get(server) else 0.0


def _deadline(orders: Orders, server: int, ms: float, why: str, key: Key, opposite: Key) -> Proposal:
    deadlines = list(orders.deadlines_ms)
    reason = f"{why}: its deadline was {deadlines[server]:g} ms, now {ms:g} ms"
    deadlines[server] = ms
    changed = dataclasses.replace(orders, deadlines_ms=tuple(deadlines))
    return Proposal("deadline", "inference", server, changed, reason, key, opposite)


def _with_envs(orders: Orders, changes: dict[int, int]) -> Orders:
    counts = (changes.get(actor, count) for actor, count in enumerate(orders.envs))
    return dataclasses.replace(orders, envs=tuple(counts))
