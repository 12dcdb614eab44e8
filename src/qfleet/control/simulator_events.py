"""The events of a simulated pipeline: messages of actors, storing, updates, exchanged gradients, published weights."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from qfleet.control.parallel_parts import VALUE
from qfleet.control.simulator_cluster import Cluster

LEAST = 0.2
"""No duration that is drawn is less than this part of its mean."""


@dataclass
class Sums:
    """What has happened since the start; seconds are those of all who work alike, together."""

    steps: float = 0.0
    updates: float = 0.0
    computed: float = 0.0
    exchanged: float = 0.0
    starved: float = 0.0
    """Seconds that learners waited for data."""
    acted: float = 0.0
    stored: float = 0.0
    """Seconds that shards worked."""
    lag: float = 0.0
    """Updates that the weights of each step were behind, added up."""
    publications: int = 0

    def since(self, before: Sums) -> Sums:
        """Return what has happened after an earlier look."""
        return Sums(**{name: value - getattr(before, name) for name, value in vars(self).items()})


class Pipeline:
    """A heap of what happens next, and who waits for what."""

    def __init__(self, cluster: Cluster, grouped: int, room: float, rng: np.random.Generator) -> None:
        """Begin with all actors somewhere in a message. `room` is how many steps actors may be ahead of learning.

        `grouped` messages of an actor are taken together.
        """
        self.sums, self.now = Sums(), 0.0
        self._cluster, self._rng, self._room = cluster, rng, room
        self._rows, self._message = grouped * cluster.rows, grouped * cluster.message
        self._message_spread = cluster.spread / math.sqrt(grouped)
        self._normal = _normals(rng)
        # Learners that wait for each other are one worker, whose part is the whole batch.
        self.workers = cluster.learners if cluster.mode == "server_async" else 1
        self._need = cluster.steps_per_update / self.workers
        self._begun, self._stored, self._reserved = 0, 0.0, 0.0
        self._blocked: deque[int] = deque()
        self._starved: dict[int, float] = {}
        self._shard_free, self._fed = [0.0] * cluster.shards, [0.0] * self.workers
        self._kept_at = [0.0] * cluster.actors
        self._server_free, self._publisher_free, self._published = 0.0, 0.0, 0
        self._arriving: deque[tuple[float, float]] = deque()
        self._version = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        for actor, begins in enumerate(rng.uniform(0.0, self._message, cluster.actors).tolist()):
            self._at(begins, self._act, actor)
        for worker in range(self.workers):
            self._at(0.0, self._learn, worker)

    def until(self, end: float) -> None:
        """Let everything happen that happens before this second."""
        while self._events and self._events[0][0] < end:
            self.now, _, happen, who = heapq.heappop(self._events)
            happen(who)

    def _at(self, second: float, happen: Callable[[Any], None], who: Any) -> None:
        heapq.heappush(self._events, (second, next(self._order), happen, who))

    def _act(self, actor: int) -> None:
        """Begin a message, if learning has room for it."""
        if self._reserved - self._begun * self._need >= self._room:
            self._blocked.append(actor)
            return
        self._reserved += self._rows
        took = self._message * max(LEAST, 1 + self._message_spread * next(self._normal))
        self.sums.acted += took
        self._at(self.now + took, self._send, (actor, self._newest()))

    def _send(self, made: tuple[int, float]) -> None:
        """Let a shard store a finished message, and begin the next when the one before is stored."""
        actor, version = made
        cluster, shard = self._cluster, actor % self._cluster.shards
        begins = max(self.now + cluster.link.latency, self._shard_free[shard])
        work = self._rows * cluster.taking
        self._shard_free[shard] = kept = begins + work
        self.sums.stored += work
        self._at(kept, self._keep, version)
        before, self._kept_at[actor] = self._kept_at[actor], kept
        if before > self.now:
            self._at(before, self._act, actor)
        else:
            self._act(actor)

    def _keep(self, version: float) -> None:
        """Count a stored message, and wake learners that it is enough for."""
        self._stored += self._rows
        self.sums.steps += self._rows
        self.sums.lag += self._rows * (self.sums.updates - version)
        while self._starved and self._enough:
            worker, since = next(iter(self._starved.items()))
            del self._starved[worker]
            self.sums.starved += self.now - since
            self._learn(worker)

    @property
    def _enough(self) -> bool:
        """Whether there are steps for one more update."""
        return self._stored >= (self._begun + 1) * self._need

    def _learn(self, worker: int) -> None:
        """Begin an update, if there are steps for it, and let actors go on."""
        if not self._enough:
            self._starved[worker] = self.now
            return
        self._begun += 1
        while self._blocked and self._reserved - self._begun * self._need < self._room:
            self._act(self._blocked.popleft())
        cluster, begins = self._cluster, max(self.now, self._fed[worker])
        self._fed[worker] = begins + cluster.feeding
        self.sums.starved += begins - self.now
        self.sums.computed += cluster.compute
        self._at(begins + cluster.compute * self._slowest(), self._push, worker)

    def _slowest(self) -> float:
        """Return a draw of how long the slowest of a worker's learners takes, as a part of the mean."""
        spread = self._cluster.spread
        if self.workers == self._cluster.learners:
            return max(LEAST, 1 + spread * next(self._normal))
        return max(LEAST, 1 + spread * float(self._rng.standard_normal(self._cluster.learners).max()))

    def _push(self, worker: int) -> None:
        """Exchange gradients: among all learners, or with servers that take one after the other."""
        exchange = self._cluster.exchange
        self.sums.exchanged += exchange
        done = self.now + exchange
        if self._cluster.mode == "server_async":
            self._server_free = max(self.now, self._server_free) + self._cluster.service
            done = max(done, self._server_free)
        self._at(done, self._apply, worker)

    def _apply(self, worker: int) -> None:
        """Count the update, publish the weights if it is time, and go on."""
        self.sums.updates += 1 / self.workers
        periods = int(self.sums.updates + 1e-9) // self._cluster.publish_period
        if periods > self._published and self.now >= self._publisher_free:  # else the next ones are newer
            self._published = periods
            self._publish()
        self._learn(worker)

    def _publish(self) -> None:
        """Hand the weights on from machine to machine, each to as many as the fan-out says."""
        cluster = self._cluster
        sending = cluster.fanout * VALUE * cluster.parameters / cluster.link.bandwidth
        self._publisher_free = self.now + sending
        self._arriving.append((self.now + cluster.hops * (cluster.link.latency + sending), self.sums.updates))
        self.sums.publications += 1

    def _newest(self) -> float:
        """Return the number of updates in the weights that have reached all actors."""
        while self._arriving and self._arriving[0][0] <= self.now:
            self._version = self._arriving.popleft()[1]
        return self._version


def _normals(rng: np.random.Generator) -> Iterator[float]:
    """Yield standard normal numbers, drawn many at a time: one by one they take most of a simulation."""
    while True:
        yield from rng.standard_normal(4096).tolist()
