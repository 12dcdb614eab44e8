"""Says from what is there what a run should have: actors on each node, learner ranks, replay shards, and why.

It sees nodes, rates and wishes as plain values and changes nothing itself. What a person asks for is done at once; what
it thinks of itself waits until things have been so for a while, and comes one change at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Limits:
    """Between what a run may change."""

    min_actors: int
    max_actors: int
    min_learners: int
    max_learners: int
    settle_s: float
    """Seconds that things must have been so before the policy adds anything by itself, and between two such changes."""
    automatic: bool = True
    """Whether it adds and moves actors, and adds shards, by itself; a node that is lost or drained is left in any
    case."""
    max_shards: int = 1


@dataclass(frozen=True)
class Wish:
    """What a person asked for; None leaves a number as it is."""

    by: str
    actors: int | None = None
    learners: int | None = None
    shards: int | None = None


@dataclass(frozen=True)
class NodeSight:
    """One living node, as far as the run is concerned."""

    id: str
    name: str
    cores: float
    actors: int
    """How many are on it."""
    others: int = 0
    """Roles of the run on it that are no actors."""
    draining: str = ""
    """Why it will soon be gone; empty if it will not."""
    ranks: int = 0
    """Learner ranks on it that could be elsewhere."""

    @property
    def room(self) -> int:
        """Actors that have a core of their own here."""
        return 0 if self.draining else max(0, math.floor(self.cores) - self.others)


@dataclass(frozen=True)
class Sight:
    """A run at one moment, in seconds."""

    at: float
    nodes: Sequence[NodeSight]
    """Those that live, the driver's first: that one is never left."""
    learners: int
    short: str = ""
    """In what way actors hold the learner up while cores are free; empty if they do not."""
    saturated: bool = False
    """Whether actors mostly wait for the learner, so that more of them would be of no use."""
    shards: int = 1
    congested: str = ""
    """In what way shards hold up actors and learner while cores are free; empty if they do not."""
    resting: frozenset[str] = frozenset()
    """What has failed so lately that it is not to be tried yet: "learner", another number; "move", another place."""


@dataclass(frozen=True)
class Change:
    """Another number of actors on one node, of learner ranks or of shards; as many ranks, if they are to move."""

    role: Literal["actor", "learner", "shard"]
    node: str
    """The id of the node; empty for all but actors."""
    before: int
    after: int
    reason: str


@dataclass
class Elastic:
    """The policy of one run. `wanted` is how many actors it should have in all, `learners` how many ranks."""

    limits: Limits
    wanted: int
    learners: int
    shards: int = 1
    _seen: dict[str, float] = field(default_factory=dict)
    """Since when each node is there; minus infinity for those that were there first."""
    _used: dict[str, int] = field(default_factory=dict)
    """What each node that joined has added to `wanted`."""
    _last: dict[str, NodeSight] = field(default_factory=dict)
    """The nodes that stayed when they were last seen."""
    _asked: str = ""
    """Who asked for the present number of actors; empty if nobody did."""
    _why: str = ""
    """Why the number or the place of actors was last changed."""
    _regrouping: str = ""
    """Why the number of learner ranks is to be changed; empty where it is not."""
    _moved_at: float = -math.inf
    """When learner ranks were last to leave a node."""
    _resharing: str = ""
    """Why the number of shards was last changed."""
    _shards_asked: bool = False
    """Whether somebody asked for the present number of shards."""
    _short_since: float | None = None
    _congested_since: float | None = None
    _calm_until: float = -math.inf

    def refusal(self, wish: Wish) -> str:
        """Return why a wish cannot be met, with what to do; empty if it can."""
        limits = self.limits
        if wish.actors is not None and not limits.min_actors <= wish.actors <= limits.max_actors:
            return (
                f"actors {wish.actors}: this run has room for {limits.min_actors} to {limits.max_actors}; a run that"
                f" shall grow further is begun with --elastic.max_actors {max(wish.actors, limits.max_actors)}"
            )
        if wish.learners is not None and not limits.min_learners <= wish.learners <= limits.max_learners:
            return (
                f"learners {wish.learners}: this run has room for {limits.min_learners} to {limits.max_learners}; a run"
                f" that shall grow further is begun with --elastic.max_learners {max(wish.learners, 2)}"
            )
        if wish.shards is not None and not 1 <= wish.shards <= limits.max_shards:
            return (
                f"shards {wish.shards}: this run has room for 1 to {limits.max_shards}; a run that shall grow further"
                f" is begun with --elastic.max_shards {max(wish.shards, 2)}"
            )
        return ""

    def take(self, wish: Wish) -> None:
        """Take over a wish that can be met; `decide` then does."""
        if wish.actors is not None:
            self.wanted, self._asked, self._why, self._used = wish.actors, wish.by, f"asked for by {wish.by}", {}
        if wish.learners is not None:
            self.learners, self._regrouping = wish.learners, f"asked for by {wish.by}"
        if wish.shards is not None:
            self.shards, self._resharing, self._shards_asked = wish.shards, f"asked for by {wish.by}", True

    def decide(self, sight: Sight) -> list[Change]:
        """Return what should change now; whoever does it shows the result in the next sight."""
        if not sight.nodes:  # nobody can be anywhere, and what is lost is known when somebody can be seen again
            return []
        self._look(sight)
        targets = self._targets(sight)
        changes = [
            Change("actor", node.id, node.actors, targets[node.id], _going(node) or self._why or "so many are missing")
            for node in sight.nodes
            if targets[node.id] != node.actors
        ]
        if self.learners == sight.learners:
            self._regrouping = ""
        if self._regrouping and "learner" not in sight.resting:  # who died comes back when a person says so
            changes.append(Change("learner", "", sight.learners, self.learners, self._regrouping))
        elif leaving := self._leaving(sight):
            changes.append(Change("learner", "", sight.learners, sight.learners, leaving))
        if self.shards != sight.shards:
            changes.append(Change("shard", "", sight.shards, self.shards, self._resharing))
        return sorted(changes, key=lambda change: change.after - change.before)  # who leaves makes room first

    def _leaving(self, sight: Sight) -> str:
        """Return why learner ranks should be elsewhere, empty if they should not; tried again only after a while."""
        going = next((node for node in sight.nodes[1:] if node.draining and node.ranks), None)
        if going is None or "move" in sight.resting or sight.at < self._moved_at + self.limits.settle_s:
            return ""
        self._moved_at = sight.at
        return _going(going)

    def _look(self, sight: Sight) -> None:
        """Note which nodes came and went and how long roles are too few; change what is wanted where that is due."""
        first, staying = not self._seen, {node.id for node in sight.nodes if not node.draining}
        places = sum(max(0, node.room - node.actors) for node in sight.nodes)
        there = {node.id: node for node in sight.nodes}
        for former in [*self._last.values()]:
            if former.id not in staying:
                now = there.get(former.id, former)
                self._calm_until = sight.at + self.limits.settle_s  # what is left must show first what it can do
                places -= self._give_up(now, places)
        for node in sight.nodes:
            self._seen.setdefault(node.id, -math.inf if first else sight.at)
        self._seen = {name: since for name, since in self._seen.items() if name in there}
        self._last = {node.id: node for node in sight.nodes if node.id in staying}
        self._short_since = _since(self._short_since, sight.at, sight.short)
        self._congested_since = _since(self._congested_since, sight.at, sight.congested)
        if self.limits.automatic and not self._shards_asked and sight.at >= self._calm_until:
            self._add_shard(sight)
        if self.limits.automatic and not self._asked and sight.at >= self._calm_until and not sight.saturated:
            self._grow(sight)

    def _give_up(self, node: NodeSight, places: int) -> int:
        """Want as many actors as there is room for without a node; returns how many of its actors go elsewhere.

        What a person asked for stays, however crowded the others get.
        """
        came = min(self._used.pop(node.id, 0), node.actors)
        moved = min(node.actors - came, places) if self.limits.automatic else 0
        self._why = _going(node) or f"node {node.name} was lost"
        if self._asked:
            return min(node.actors, places)
        self.wanted -= node.actors - moved
        return moved

    def _add_shard(self, sight: Sight) -> None:
        """Want one more shard where they have held up the others for long."""
        enough = self._congested_since is None or sight.at - self._congested_since < self.limits.settle_s
        if not enough and self.shards < self.limits.max_shards:
            self.shards, self._resharing = self.shards + 1, sight.congested
            self._congested_since, self._calm_until = None, sight.at + self.limits.settle_s

    def _grow(self, sight: Sight) -> None:
        """Want more actors for a node that joined and stayed, or one more where they hold the learner up."""
        left, settle_s = self.limits.max_actors - self.wanted, self.limits.settle_s
        for node in sight.nodes:
            joined = self._seen[node.id] > -math.inf and node.id not in self._used
            if joined and sight.at - self._seen[node.id] >= settle_s and (more := min(left, node.room)) > 0:
                self._used[node.id] = more
                self._want(self.wanted + more, f"node {node.name} joined with {node.cores:g} cores", sight.at)
                return
        enough = self._short_since is None or sight.at - self._short_since < settle_s
        if left > 0 and not enough:
            self._short_since = None
            self._want(self.wanted + 1, sight.short, sight.at)

    def _want(self, actors: int, why: str, now: float) -> None:
        self.wanted, self._why, self._calm_until = actors, why, now + self.limits.settle_s

    def _targets(self, sight: Sight) -> dict[str, int]:
        """Return how many actors each node should have: as many as it has, as far as that can be."""
        wanted = min(max(self.wanted, self.limits.min_actors), self.limits.max_actors)
        staying = [node for node in sight.nodes if not node.draining] or list(sight.nodes[:1])
        targets = {node.id: node.actors if node in staying else 0 for node in sight.nodes}
        while sum(targets.values()) > wanted:
            targets[_fullest(staying, targets).id] -= 1
        while sum(targets.values()) < wanted:
            targets[self._roomiest(staying, targets, sight.at).id] += 1
        return targets

    def _roomiest(self, nodes: Sequence[NodeSight], targets: Mapping[str, int], now: float) -> NodeSight:
        """Return who gets one more actor: a node that they are for, or the one with most room.

        Nodes that have just joined come last, unless a person waits.
        """
        settle_s = 0.0 if self._asked else self.limits.settle_s

        def fitness(node: NodeSight) -> tuple[bool, bool, int, float]:
            own = targets[node.id] < self._used.get(node.id, 0)
            return own, now - self._seen[node.id] >= settle_s, node.room - targets[node.id], node.cores

        return max(nodes, key=fitness)


def _since(before: float | None, now: float, what: str) -> float | None:
    """Return since when something is so that is so now; None if it is not."""
    if not what:
        return None
    return now if before is None else before


def _going(node: NodeSight) -> str:
    """Return why a node is left; empty if it is not."""
    return f"node {node.name} is to go ({node.draining})" if node.draining else ""


def _fullest(nodes: Sequence[NodeSight], targets: Mapping[str, int]) -> NodeSight:
    """Return which node gives up an actor: the one with least room for those it has; the last of several."""
    able = [node for node in nodes if targets[node.id] > 0]
    return min(reversed(able), key=lambda node: node.room - targets[node.id])
