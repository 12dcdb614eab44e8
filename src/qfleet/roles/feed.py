"""The learner's side of its batch streams: whose turn it is, weights that fit all shards, and where priorities go."""

from __future__ import annotations

import dataclasses

import numpy as np

from qfleet.core.protocols import Receiver, Sender, Subscriber
from qfleet.core.role import State
from qfleet.core.types import Batch, Priorities, Rollout, SequenceBatch, Standing

Learnable = Batch | SequenceBatch | Rollout


class Feed:
    """The streams of one learner rank: from one replay shard, from several, or from actors without a replay.

    With several shards batches are taken in proportion to the shards' masses, by smooth weighted round robin: each
    turn every shard earns its share of a batch, and whoever has earned most gives one. So no shard is ever ahead or
    behind by more batches than there are shards.

    A shard whose turn it is is waited for. That cannot last: when others have drawn all that the limiter allows, more
    experience comes in, and the next batch is drawn where there is room, by that shard. When none comes any more, it
    closes its stream, and a stream that is exhausted has no turn.
    """

    def __init__(
        self,
        batches: tuple[Receiver[Learnable], ...],
        priorities: tuple[Sender[Priorities], ...] = (),
        standings: tuple[Subscriber[Standing], ...] = (),
        max_decay: float = 1.0,
    ) -> None:
        """Take from `batches`; the `priorities` of each shard's items go back to it.

        Several shards tell their `standings`. `max_decay` is the factor on the run-wide maximum priority at each
        write-back.
        """
        self._batches, self._priorities = batches, priorities
        self._standings, self._max_decay = standings, max_decay
        self._known = [Standing(0.0, 1.0) for _ in standings]
        self._earned = [0.0 for _ in standings]
        self._highest = 0.0
        self.awaited = batches
        """What a message must come from when there is none now."""

    def receive(self) -> Learnable | None:
        """Return the next batch or rollout; None if there is none now, or none of the shard whose turn it is."""
        if not self._standings:
            return self._first()
        for number, subscriber in enumerate(self._standings):
            self._known[number] = subscriber.latest() or self._known[number]
        masses = [
            0.0 if stream.exhausted() else standing.mass
            for stream, standing in zip(self._batches, self._known, strict=True)
        ]
        if not any(masses):  # what was drawn before a shard lost all that it had
            self.awaited = self._batches
            return self._first()
        earned = [credit + mass / sum(masses) for credit, mass in zip(self._earned, masses, strict=True)]
        turn = max((number for number, mass in enumerate(masses) if mass), key=lambda number: earned[number])
        message = self._batches[turn].receive()
        if message is None:
            self.awaited = (self._batches[turn],)  # messages of others are no reason to look again
            return None
        earned[turn] -= 1.0
        self._earned = earned
        return self._rescaled(message)

    def _first(self) -> Learnable | None:
        """Return what the first stream has that has something."""
        received = (stream.receive() for stream in self._batches)
        return next((message for message in received if message is not None), None)

    def _rescaled(self, message: Learnable) -> Learnable:
        """Return a batch whose weights are relative to the least value of all shards, not of its own alone."""
        if isinstance(message, Rollout) or message.beta == 0.0:
            return message
        # Its own shard's least is that of the draw: a later one could be above a value that was drawn.
        others = [one.least for number, one in enumerate(self._known) if one.mass and number != message.shard]
        factor = (min([message.least, *others]) / message.least) ** message.beta
        return dataclasses.replace(message, weight=message.weight * np.float32(factor))

    def exhausted(self) -> bool:
        """Return whether nothing will come any more."""
        return all(stream.exhausted() for stream in self._batches)

    def full(self) -> tuple[Sender[Priorities], ...]:
        """Return the priority streams that have no room now."""
        return tuple(sender for sender in self._priorities if not sender.ready())

    def has_room(self, shard: int) -> bool:
        """Return whether priorities can be sent to a shard now."""
        return self._priorities[shard].ready()

    def write_back(self, priorities: Priorities) -> None:
        """Send the new priorities of a batch to the shard that drew it."""
        if self._standings:
            found = priorities.priority[np.isfinite(priorities.priority)]
            self._highest = max(float(found.max(initial=0.0)), self._highest * self._max_decay)
            priorities = dataclasses.replace(priorities, highest=self._highest)
        self._priorities[priorities.shard].send(priorities)

    def state_dict(self) -> State:
        """Return what the shards have earned and told, and the run-wide maximum priority."""
        return {"earned": self._earned, "known": self._known, "highest": self._highest}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`."""
        self._earned, self._known, self._highest = list(state["earned"]), list(state["known"]), state["highest"]
