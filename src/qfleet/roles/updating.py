"""How a learner's messages become updates: one by one, or the next on its way while the device still learns."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from qfleet.accel.mirror import ReplayMirror
from qfleet.accel.returning import Returning
from qfleet.accel.staging import Recorder, Staging
from qfleet.accel.transfers import Link
from qfleet.algo.updates import DeepUpdate, Learned, ReplayUpdate, Update, UpdateResult
from qfleet.core.types import Batch, Rollout, SequenceBatch

Message = Batch | SequenceBatch | Rollout
Finished = tuple[Message, UpdateResult]
"""A message, perhaps without its observations, and what came of it."""


class Updating(Protocol):
    """Learns from messages in the order in which they come."""

    @property
    def waiting(self) -> int:
        """How many messages were taken and not learned from."""

    def advance(self, message: Message | None) -> Message | None:
        """Take a message if there is one, whose arrays are gone when this step of the role is over.

        Return the one that was learned from, perhaps without its observations; None if none was waiting for it.
        """

    def finished(self, least: float = 0) -> list[Finished]:
        """Return what came of the messages, the oldest first, as far as it is known.

        Waits until that is known of `least` of them, or of all that were learned from: all where it is infinite.
        """


class OneByOne:
    """Learns from each message as it comes, and waits for what comes of it."""

    waiting = 0

    def __init__(self, update: Update, mirror: ReplayMirror | None = None) -> None:
        self._update, self._mirror = update, mirror
        self._updates = update.updates
        self._finished: list[Finished] = []

    def advance(self, message: Message | None) -> Message | None:
        """Learn from the message; count by the device what only the device knows."""
        if message is None:
            return None
        if isinstance(self._update, DeepUpdate):
            self._update.prepare()
        _bring_up(message, self._mirror)
        result = self._update(message)
        before, self._updates = self._updates, self._update.updates
        made = self._updates - before
        result = dataclasses.replace(result, updates=made, skipped=result.updates + result.skipped - made)
        self._finished.append((message, result))
        return message

    def finished(self, least: float = 0) -> list[Finished]:
        """Return what came of the last message, once."""
        finished, self._finished = self._finished, []
        return finished


class Ahead:
    """Keeps a GPU busy: a batch is copied up while it learns from the last one, results are read when they arrive.

    What came of a batch is known a few batches later, as many as the slots allow. A process that dies takes the batch
    that waits with it: that is a sample, so no transition is lost, but the run's count of samples is ahead by one.
    """

    def __init__(
        self, update: ReplayUpdate, link: Link, period: int, record: Recorder, mirror: ReplayMirror | None = None
    ) -> None:
        """Bring the learning rate up to date, for which the device is waited for, every `period` batches.

        `record` makes of an update of one slot's batch what is called for each of them.
        """
        self._update, self._period, self._mirror = update, period, mirror
        self._begun = 0
        self._staging = Staging(link, update.learn, record)
        self._taken: deque[Batch] = deque()
        self._returning: Returning[tuple[Batch, Learned]] = Returning(link)

    @property
    def waiting(self) -> int:
        """How many batches were taken and not learned from: at most one."""
        return len(self._staging)

    def advance(self, message: Message | None) -> Batch | None:
        """Let the device learn from the batch that waits; meanwhile start the next one on its way."""
        learned = self._learn() if self.waiting else None
        if message is not None:
            assert isinstance(message, Batch)
            _bring_up(message, self._mirror)  # only now: the last batch may mean what these rows held before
            self._staging.stage(message)
            self._taken.append(_without_observations(message))
        return learned

    def _learn(self) -> Batch:
        if self._begun % self._period == 0:
            self._update.prepare()
        self._begun += 1
        batch, learned = self._taken.popleft(), self._staging.use()
        told = (learned.priority, learned.made) if isinstance(learned.made, Tensor) else (learned.priority,)
        self._returning.send((batch, learned), told)
        return batch

    def finished(self, least: float = 0) -> list[Finished]:
        """Return what came of the batches, the oldest first, as far as the device has told; waits for `least`."""
        arrived = self._returning.arrived(least)
        return [(batch, _result(batch.updates, learned, *told)) for (batch, learned), told in arrived]


def _bring_up(message: Message, mirror: ReplayMirror | None) -> None:
    """Copy what is new in the shard's memory to the device, where batches have rows instead of observations."""
    if mirror is not None and isinstance(message, Batch) and message.fresh is not None:
        mirror.bring_up(message.fresh)


def _result(updates: int, learned: Learned, priority: Any, told: Any = None) -> UpdateResult:
    """Return what the host is told of a batch for so many updates; `told` is how many were made, if it had to ask."""
    made = int(learned.made if told is None else told)
    return UpdateResult(made, skipped=updates - made, priority=priority if made else None, metrics=learned.metrics)


def _without_observations(batch: Batch) -> Batch:
    """Return what is left to know of a batch that is on its way, in memory of its own."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    copies: dict[str, Any] = {name: part.copy() for name, part in fields.items() if isinstance(part, np.ndarray)}
    return dataclasses.replace(batch, **{**copies, "observation": {}, "next_observation": {}, "fresh": None})
