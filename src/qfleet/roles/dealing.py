"""How a shard sends the parts of one draw to all learner ranks as one, though its process may die in the middle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qfleet.core.protocols import Counter, Keep, Sender
from qfleet.core.types import Batch, Floats, Ints, SequenceBatch, Standing
from qfleet.replay.allocation import zeros

Drawn = Batch | SequenceBatch


@dataclass(frozen=True)
class Unsent:
    """A draw of a former life that some ranks still wait for."""

    index: Ints  # [B]
    weight: Floats  # [B]
    beta: float
    standings: tuple[Standing, ...]
    draw: int
    parts: int
    ranks: list[int]
    """Those that did not get theirs."""


class Dealing:
    """Cuts draws into parts and sends them.

    Ranks that wait for each other must get parts of the same draws, all of them. So what a draw consists of is kept
    until the next one: a later life makes it again, to the bit, for those that did not get their parts. No row can have
    been replaced meanwhile: a shard takes nothing in while it sends.
    """

    def __init__(
        self,
        batches: tuple[Sender[Drawn], ...],
        samples: Counter,
        size: int,
        shards: int,
        split: int,
        keep: Keep | None,
    ) -> None:
        """Send draws of `size` items; each `split` ranks share a network and get the same part."""
        self._batches, self._samples, self._split, self._shards = batches, samples, split, shards
        allocate = zeros if keep is None else keep.array
        self._index: Ints = allocate("draw.index", (size,), np.int64)
        self._weight: Floats = allocate("draw.weight", (size,), np.float32)
        self._told = allocate("draw.told", (1 + 2 * shards,), np.float64)
        """The exponent of the weights, then mass and least value of each shard."""
        self._before: Ints = allocate("draw.before", (len(batches),), np.int64)
        """How many messages each rank had been sent before; -1 for ranks that get no part."""
        self._number: Ints = allocate("draw.number", (1,), np.int64)
        """Of the draw that the others describe; 0 while they are being written."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that have not left for good."""
        return [rank for rank, sender in enumerate(self._batches) if not sender.deserted()]

    def parts(self, ranks: list[int]) -> int:
        """Return into how many parts a draw for these ranks is cut."""
        return len(ranks) // self._split

    def send(self, batch: Drawn, ranks: list[int]) -> None:
        """Count a draw and send `ranks` their parts of it."""
        self._number[0] = 0
        self._index[:], self._weight[:] = batch.index, batch.weight
        self._told[0] = batch.beta
        self._told[1 : 1 + 2 * len(batch.standings)] = [x for one in batch.standings for x in (one.mass, one.least)]
        self._before[:] = -1
        self._before[ranks] = [self._batches[rank].sent() for rank in ranks]
        self._number[0] = batch.draw
        self._samples.add(batch.draw - self._samples.own())
        self.send_parts(batch, ranks)

    def unsent(self) -> Unsent | None:
        """Return what a former life had begun to send, if some rank did not get it."""
        number = int(self._number[0])
        if number == 0:
            return None
        self._samples.add(max(number - self._samples.own(), 0))  # it may have died before it counted
        addressed = np.flatnonzero(self._before >= 0).tolist()
        ranks = [rank for rank in addressed if self._batches[rank].sent() == self._before[rank]]
        if not ranks:
            return None
        pairs = self._told[1:].reshape(-1, 2).tolist() if self._shards > 1 else []
        return Unsent(
            index=self._index.copy(),
            weight=self._weight.copy(),
            beta=float(self._told[0]),
            standings=tuple(Standing(*pair) for pair in pairs),
            draw=number,
            parts=self.parts(addressed),
            ranks=ranks,
        )

    def forget(self) -> None:
        """Have nothing to send again: the run was restored from a checkpoint."""
        self._number[0] = 0

    def send_parts(self, batch: Drawn, ranks: list[int]) -> None:
        """Send `ranks` their parts of a draw that is counted already."""
        for rank in ranks:
            replica = rank // self._split
            self._batches[rank].send(batch if batch.parts == 1 else share_of(batch, replica, batch.parts))


def share_of(draw: Drawn, replica: int, replicas: int) -> Drawn:
    """Return the rows of one replica: every so many strata of the one global draw."""

    def part(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.ascontiguousarray(value[replica::replicas])
        if isinstance(value, dict):
            return {name: part(leaf) for name, leaf in value.items()}
        return value

    return dataclasses.replace(draw, **{f.name: part(getattr(draw, f.name)) for f in dataclasses.fields(draw)})


def joined(shares: Sequence[Drawn]) -> Drawn:
    """Return the draw of which all replicas, in their order, got these shares."""

    def whole(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, np.ndarray):
            rows = np.empty((sum(map(len, values)), *first.shape[1:]), first.dtype)
            for replica, value in enumerate(values):
                rows[replica :: len(values)] = value
            return rows
        if isinstance(first, dict):
            return {name: whole([value[name] for value in values]) for name in first}
        return first

    names = [f.name for f in dataclasses.fields(shares[0])]
    return dataclasses.replace(shares[0], **{name: whole([getattr(one, name) for one in shares]) for name in names})
