"""Simulates a whole pipeline at sizes that cannot be had here: how fast it would be, and what would limit it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from qfleet.control.parallel_parts import VALUE
from qfleet.control.simulator_cluster import Cluster
from qfleet.control.simulator_events import Pipeline, Sums

UPDATES = 90
"""Updates of the whole batch that are simulated at least, a third of them to get going."""
MESSAGES = 12
"""Messages of an actor that are simulated at least, if it is never held up."""
ALL_MESSAGES = 90
"""Messages of all actors that learning needs meanwhile."""
EVENTS = 200_000
"""Where there would be more messages, several of an actor's are taken together; more updates are not simulated."""
WARM = 1 / 3
"""Part of the simulated time that does not count."""
STARVING = 0.1
"""Learners that wait for data for less than this share of their time are what limits the others."""


@dataclass(frozen=True)
class Simulated:
    """What a cluster would do."""

    env_steps_per_s: float
    """As many as the updates need: neither side gets far ahead of the other."""
    updates_per_s: float
    """Of the whole batch."""
    computing: float
    """Share of a learner's time in which it computes."""
    exchanging: float
    """Share in which it sends and receives gradients."""
    idle: float
    """Share in which it waits for slower learners, for a busy server, or for data."""
    starved: float
    """Share in which it waits for data."""
    policy_lag: float
    """Updates made between the weights that a step was acted with and the moment at which it is stored, the mean."""
    busy: dict[str, float]
    """Share of its time that one actor, shard, or inference server works."""
    bytes_per_s: dict[str, float]
    """Sent and received by one machine of each kind."""
    bottleneck: str
    grouped: int
    """Messages of an actor that were taken together."""


def simulate(cluster: Cluster, seed: int = 0) -> Simulated:
    """Return what a cluster would do; takes a few seconds for 10,000 actors and 1,024 learners."""
    away = cluster.recovery_s / cluster.failure_s if cluster.failure_s else 0.0
    able = replace(cluster, message=cluster.message * (1 + away))
    grouped, horizon = _extent(able)
    pipeline = Pipeline(able, grouped, _room(able, grouped), np.random.default_rng(seed))
    pipeline.until(WARM * horizon)
    before = replace(pipeline.sums)
    pipeline.until(horizon)
    # A failure stops a group whose learners wait for each other; else it takes one of them away.
    together = 1 if cluster.mode == "server_async" else cluster.learners + cluster.used_servers
    window = (1 - WARM) * horizon * (1 + away * together)
    return _told(able, pipeline.sums.since(before), window, pipeline.workers, grouped)


def limits(cluster: Cluster) -> dict[str, float]:
    """Return the updates a second that each part alone would allow, if nothing ever varied."""
    steps = cluster.steps_per_update
    found = {
        "actors": cluster.actors * cluster.rows / cluster.message / steps,
        "replay": cluster.shards / (cluster.taking * steps) if cluster.taking else math.inf,
        "learners": 1 / (cluster.compute + cluster.exchange),
    }
    if cluster.feeding:
        found["batches"] = 1 / cluster.feeding
    if cluster.mode == "server_async":
        found["servers"] = 1 / (cluster.service * cluster.learners)
    return found


def _extent(cluster: Cluster) -> tuple[int, float]:
    """Return how many messages of an actor are taken together, and the seconds that are simulated."""
    rate = min(limits(cluster).values())
    updates = max(UPDATES, ALL_MESSAGES * cluster.rows / cluster.steps_per_update, MESSAGES * cluster.message * rate)
    workers = cluster.learners if cluster.mode == "server_async" else 1
    horizon = min(updates, max(UPDATES, EVENTS / workers)) / rate
    messages = min(cluster.actors / cluster.message, _wanted(cluster) / cluster.rows) * horizon
    most = int(horizon / (MESSAGES * cluster.message))
    return max(1, min(most, math.ceil(messages / EVENTS))), horizon


def _wanted(cluster: Cluster) -> float:
    """Return the steps a second that learners could use."""
    rates = [rate for part, rate in limits(cluster).items() if part != "actors"]
    return min(rates) * cluster.steps_per_update


def _room(cluster: Cluster, grouped: int) -> float:
    """Return how many steps actors may be ahead: twice what learning takes in while a message is made."""
    return 2 * (_wanted(cluster) * grouped * cluster.message + grouped * cluster.rows + cluster.steps_per_update)


def _told(cluster: Cluster, sums: Sums, window: float, workers: int, grouped: int) -> Simulated:
    """Return the rates and shares of some seconds."""
    computing, exchanging, starved = (
        seconds / (workers * window) for seconds in (sums.computed, sums.exchanged, sums.starved)
    )
    busy = {"actor": sums.acted / (cluster.actors * window), "shard": sums.stored / (cluster.shards * window)}
    if cluster.served:
        busy["inference server"] = cluster.served * busy["actor"]
    idle = max(0.0, 1 - computing - exchanging)
    return Simulated(
        env_steps_per_s=sums.updates / window * cluster.steps_per_update,
        updates_per_s=sums.updates / window,
        computing=computing,
        exchanging=exchanging,
        idle=idle,
        starved=starved,
        policy_lag=sums.lag / sums.steps if sums.steps else 0.0,
        busy=busy,
        bytes_per_s=_traffic(cluster, sums, window),
        bottleneck=_bottleneck(cluster, busy, computing, exchanging, starved),
        grouped=grouped,
    )


def _traffic(cluster: Cluster, sums: Sums, window: float) -> dict[str, float]:
    """Return the bytes a second that one machine of each kind sends and receives."""
    updates = sums.updates / window
    steps = updates * cluster.steps_per_update
    weights = VALUE * cluster.parameters * sums.publications / window
    found = {
        "actor": steps * cluster.row_bytes / cluster.actors + weights * (1 + cluster.fanout),
        "shard": (steps * cluster.row_bytes + updates * cluster.batch_bytes) / cluster.shards,
        "learner": updates * (cluster.sent + cluster.batch_bytes / cluster.learners),
        "publisher": weights * cluster.fanout,
    }
    if cluster.used_servers:
        found["server"] = updates * cluster.sent * cluster.learners / cluster.used_servers
    return found


def _bottleneck(cluster: Cluster, busy: dict[str, float], computing: float, exchanging: float, starved: float) -> str:
    """Return what a person would have to make faster."""
    if starved >= STARVING:
        if busy["shard"] >= busy["actor"]:
            return "the replay shards"
        served = cluster.served > 0.5
        return "the inference servers" if served else "the actors"
    waiting = max(0.0, 1 - computing - exchanging - starved)
    parts = {
        "the learners' computing": computing,
        "the exchange of gradients": exchanging,
        "a busy server" if cluster.mode == "server_async" else "waiting for the slowest learner": waiting,
    }
    return max(parts, key=lambda part: parts[part])
