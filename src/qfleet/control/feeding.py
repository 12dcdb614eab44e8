"""Times how a GPU's learner is fed in processes: what its shard stores and draws, and updates that wait for nothing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from qfleet.algo.agent import ReplayAgent
from qfleet.control.candidates import format_put_back
from qfleet.control.pieces import experience, seconds_of
from qfleet.core import codec
from qfleet.core.types import Array, Batch, Version
from qfleet.replay import Replay, ReplayConfig
from qfleet.replay.storage import PlainColumn, kept_name
from qfleet.roles.learner import Learner
from qfleet.roles.learner_setup import LearnerSetup
from qfleet.roles.learning import build_learning
from qfleet.roles.publishing import SELDOM
from qfleet.roles.updating import Updating
from qfleet.roles.weight_store import snapshot

ROWS = 20_000
"""The replay of a measurement holds no more."""
STREAMS = 8
BATCHES = 16
"""Different batches that are learned from in turn."""


@dataclass(frozen=True)
class FeedCost:
    """Seconds of the pieces."""

    store: float
    """Of the shard, for each row."""
    draw: float
    """Of the shard, for each update."""
    message: float
    """Packing, copying and unpacking, for each update."""
    update: float
    """Of the learner, for each of them, publishing included; it and its GPU work at the same time."""


def feed_cost(setup: LearnerSetup, config: ReplayConfig, mirrored: bool) -> FeedCost:
    """Return what feeding such a learner costs; `mirrored` if it has a copy of the replay's observations."""
    agent = setup.agent
    assert isinstance(agent, ReplayAgent)
    shrunk: ReplayConfig = config.replace(capacity=min(config.capacity, ROWS))
    rng = np.random.default_rng(0)
    replay = Replay(shrunk, setup.spec, streams=STREAMS, n_step=agent.n_step, gamma=agent.gamma, rng=rng)
    if mirrored:
        replay.store.mirror()
    message = experience(setup.spec, math.ceil(setup.learner.train_period / STREAMS), STREAMS)
    rows, numbers = len(message.action), itertools.count()
    updates = setup.learner.updates_per_draw
    draw = partial(replay.sample, setup.learner.batch_size, updates=updates)

    def store() -> None:
        replay.append(dataclasses.replace(message, sequence=next(numbers)))

    for _ in range(max(shrunk.capacity // (2 * rows), 2 * agent.n_step)):
        store()
    draw()  # what was stored until now is not for one of the batches to bring up
    batches = []
    for _ in range(BATCHES):
        store()
        batches.append(codec.roundtrip(draw()))
    return FeedCost(
        store=seconds_of(store) / rows,
        draw=seconds_of(draw) / updates,
        message=seconds_of(lambda: codec.roundtrip(batches[-1])) / updates,
        update=_update_seconds(setup, batches, ReplayRows(replay) if mirrored else None),
    )


class ReplayRows:
    """A replay's memory as a learner sees it."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def rows(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """Return the rows [R, ...] of the leaf that is kept by this name."""
        columns = {kept_name(leaf): column for leaf, column in self._replay.store.observations.items()}
        column = columns[name]
        assert isinstance(column, PlainColumn)
        return column.array


def _update_seconds(setup: LearnerSetup, batches: list[Batch], rows: ReplayRows | None) -> float:
    with format_put_back():
        learning = build_learning(setup, Learner.kind, None)
        if rows is not None:
            learning.look_at(rows, setup, whole=True)
        updating = learning.updating(setup)
        made = sum(batch.updates for batch in batches)
        update = seconds_of(lambda: _learn(updating, batches, setup.device)) / made
        publishing = seconds_of(lambda: snapshot(learning.update.flat, Version(), 0))
    return update + min(publishing / setup.learner.publish_period, update / SELDOM)


def _learn(updating: Updating, batches: list[Batch], device: str) -> None:
    for batch in batches:
        updating.advance(batch)
        updating.finished()
    if device == "cuda":
        torch.cuda.synchronize()
