"""The learner's side of its batch streams: whose turn it is, weights that fit all shards, and where priorities go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qfleet.core.protocols import Receiver, Sender
from qfleet.core.role import State
from qfleet.core.types import Batch, Priorities, Rollout, SequenceBatch, Standing

Learnable = Batch | SequenceBatch | Rollout
Turns = NDArray[np.float64]
_NO_MORE = 2**62
"""The number of the next draw where there is none."""


@dataclass(frozen=True)
class Company:
    """The ranks that learn from parts of the same draws."""

    replicas: int
    newest: Callable[[int], int]
    """Returns the largest of the numbers that all ranks give; each calls it, in the same order."""


class Feed:
    """The streams of one learner rank: from one replay shard, from several, or from actors without a replay.

    With several shards batches are taken in proportion to the shards' masses, by smooth weighted round robin: each
    turn every shard earns its share of a batch, and whoever has earned most gives one. So no shard is ever ahead or
    behind by more batches than there are shards. All that decides is in the batches themselves, which tell how the
    shards stand, and in where streams end: ranks that get the same draws take them in the same order.

    A shard whose turn it is is waited for. That cannot last: when others have drawn all that the limiter allows, more
    experience comes in, and the next batch is drawn where there is room, by that shard. When none comes any more, it
    closes its stream, and a stream that is exhausted has no turn.
    """

    def __init__(
        self,
        batches: tuple[Receiver[Learnable], ...],
        priorities: tuple[Sender[Priorities], ...] = (),
        shards: int = 1,
        max_decay: float = 1.0,
        company: Company | None = None,
    ) -> None:
        """Take from `batches`; the `priorities` of each shard's items go back to it.

        `max_decay` is the factor on the maximum priority of several shards at each write-back. Where the rank has
        `company`, parts of draws that were cut for another number of ranks are left out.
        """
        self._batches, self._priorities, self._max_decay = batches, priorities, max_decay
        self._in_turn, self._company = shards > 1, company
        self._known = [Standing(1.0, 1.0) for _ in batches]
        """How the shards stood at the last batch; all alike before the first."""
        self._earned = [0.0 for _ in batches]
        self._ended = [False for _ in batches]
        self._since: list[int | None] = [0 for _ in batches]
        """The first draw of each shard that is still to be learned from; None when the ranks have to find out."""
        self._highest = 0.0
        self.awaited = batches
        """What a message must come from when there is none now."""

    def receive(self) -> Learnable | None:
        """Return the next batch or rollout; None if there is none now, or none of the shard whose turn it is."""
        if not self._in_turn:
            received = (self._next(number) for number in range(len(self._batches)))
            return next((message for message in received if message is not None), None)
        while not all(self._ended):
            turn, earned = self._turn()
            message = self._next(turn)
            if message is not None:
                assert not isinstance(message, Rollout)
                earned[turn] -= 1.0
                self._earned, self._known = earned, list(message.standings) or self._known
                return _rescaled(message)
            if not self._ended[turn]:
                self.awaited = (self._batches[turn],)  # messages of others are no reason to look again
                return None
        return None

    def _turn(self) -> tuple[int, list[float]]:
        """Return whose turn it is, and what each shard has earned when that is over."""
        going = [number for number, ended in enumerate(self._ended) if not ended]
        # A shard of which the others do not know yet has drawn, too, when these have come to their end.
        heard = [number for number in going if self._known[number].mass] or going
        masses = [self._known[number].mass if number in heard else 0.0 for number in range(len(self._batches))]
        total = sum(masses) or 1.0
        earned = [credit + mass / total for credit, mass in zip(self._earned, masses, strict=True)]
        return max(heard, key=lambda number: earned[number]), earned

    def _next(self, number: int) -> Learnable | None:
        """Return the next message of a stream that all ranks have still before them."""
        stream = self._batches[number]
        while (message := stream.receive()) is not None:
            if isinstance(message, Rollout):
                return message
            cut_for_others = self._company is not None and message.parts != self._company.replicas
            if not cut_for_others and message.draw >= self._first(number, message.draw):
                return message
        self._ended[number] = stream.exhausted()
        if self._ended[number]:
            self._first(number, _NO_MORE)  # the others may have something left of it
        return None

    def _first(self, number: int, draw: int) -> int:
        """Return the first draw of a shard that counts; ranks, of whom this one has `draw`, may have to ask for it."""
        since = self._since[number]
        if since is None:
            assert self._company is not None
            since = self._since[number] = self._company.newest(draw)
        return since

    def realign(self) -> None:
        """Find out, with the other ranks, what all of them have before them: what one has not begun to learn from,
        another may have behind it."""
        if self._company is not None:
            self._since = [None for _ in self._batches]

    def resume_after(self, shard: int, draw: int, turns: Turns) -> None:
        """Go on as after that draw of a shard, when `turns` stood as they do here; it may still be in the stream."""
        self._since[shard] = draw + 1
        self._earned = turns[0].tolist()
        self._known = [Standing(mass, 1.0) for mass in turns[1].tolist()]

    @property
    def turns(self) -> Turns:
        """[2, S] what each shard has earned, and the mass that it told last: whose turn is next follows from these."""
        return np.array([self._earned, [one.mass for one in self._known]])

    def exhausted(self) -> bool:
        """Return whether nothing will come any more, after `receive` has found nothing."""
        return all(self._ended)

    def full(self) -> tuple[Sender[Priorities], ...]:
        """Return the priority streams that have no room now."""
        return tuple(sender for sender in self._priorities if not sender.ready())

    def has_room(self, shard: int) -> bool:
        """Return whether priorities can be sent to a shard now."""
        return self._priorities[shard].ready()

    def write_back(self, priorities: Priorities) -> None:
        """Send the new priorities of a batch to the shard that drew it."""
        if self._in_turn:
            found = priorities.priority[np.isfinite(priorities.priority)]
            self._highest = max(float(found.max(initial=0.0)), self._highest * self._max_decay)
            priorities = dataclasses.replace(priorities, highest=self._highest)
        self._priorities[priorities.shard].send(priorities)

    def state_dict(self) -> State:
        """Return what the shards have earned and told, and the run-wide maximum priority."""
        earned, known = (self._earned, self._known) if self._in_turn else ([], [])
        return {"earned": earned, "known": known, "highest": self._highest}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`."""
        if self._in_turn:
            self._earned, self._known = list(state["earned"]), list(state["known"])
        self._highest = state["highest"]


def _rescaled(batch: Batch | SequenceBatch) -> Batch | SequenceBatch:
    """Return a batch whose weights are relative to the least value of all shards, not of its own alone."""
    if batch.beta == 0.0:
        return batch
    # Its own shard's least is that of the draw.
    others = [one.least for number, one in enumerate(batch.standings) if one.mass and number != batch.shard]
    factor = (min([batch.least, *others]) / batch.least) ** batch.beta
    return dataclasses.replace(batch, weight=batch.weight * np.float32(factor))
