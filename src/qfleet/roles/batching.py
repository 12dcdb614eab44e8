"""When waiting requests are computed together: at once if enough are there or nobody else can come, else later."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A request that waits to be computed, and the rows of the batch that hold its observations."""

    client: int
    sequence: int
    first: int
    rows: int
    since: float
    """When it came, in seconds."""

    @property
    def part(self) -> slice:
        """Its rows of the batch."""
        return slice(self.first, self.first + self.rows)


class Batcher:
    """Lays requests of several clients side by side into the rows of one batch; each client waits for one at a time."""

    def __init__(self, batch: int, deadline_s: float) -> None:
        """Begin empty; `batch` rows are computed at once, and no request waits longer than `deadline_s` for more."""
        self._batch = batch
        self.deadline_s = deadline_s
        self._waiting: dict[int, Waiting] = {}
        self.rows = 0
        """How many rows are taken."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, client: int) -> bool:
        return client in self._waiting

    @property
    def waiting(self) -> list[Waiting]:
        """All requests that wait, the oldest first."""
        return list(self._waiting.values())

    def add(self, client: int, sequence: int, rows: int, now: float) -> slice:
        """Let a client's request wait; returns where its rows belong."""
        if client in self._waiting:
            raise ValueError(f"client {client} waits already")
        request = self._waiting[client] = Waiting(client, sequence, self.rows, rows, now)
        self.rows += rows
        return request.part

    def seconds_left(self, now: float, present: Collection[int]) -> float:
        """Return how long to wait for more requests, of the clients that are `present`; 0 says to compute now."""
        if self.rows >= self._batch or all(client in self._waiting for client in present):
            return 0.0
        oldest = next(iter(self._waiting.values()))
        return max(0.0, oldest.since + self.deadline_s - now)

    def take(self) -> list[Waiting]:
        """Return all requests, the oldest first, and begin an empty batch."""
        taken, self._waiting, self.rows = self.waiting, {}, 0
        return taken
