"""Which rows a batch takes: uniformly, or in proportion to their priorities; both know exactly what is sampleable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
from pydantic import Field

from qfleet.core.config import Config
from qfleet.core.role import State
from qfleet.core.types import Bools, Floats, Ints
from qfleet.replay.allocation import Allocate, zeros
from qfleet.replay.records import Records
from qfleet.replay.sumtree import Doubles, make_sum_tree


class UniformConfig(Config):
    """Every sampleable item is equally likely."""

    kind: Literal["uniform"] = "uniform"


class PrioritisedConfig(Config):
    """Items are drawn in proportion to (priority + epsilon)^alpha."""

    kind: Literal["prioritised"] = "prioritised"
    alpha: float = Field(0.6, ge=0, le=1)
    """How strongly priorities count; 0 is uniform."""
    beta_start: float = Field(0.4, ge=0, le=1)
    """How strongly the importance weights correct at the start of the run."""
    beta_end: float = Field(1.0, ge=0, le=1)
    """The same at the end of the run; linear between."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to each priority, so that none becomes 0."""
    max_decay: float = Field(0.9995, gt=0, le=1)
    """Factor on the run-wide maximum priority at each write-back; new items get that maximum."""
    initial: Literal["maximum", "actor"] = "maximum"
    """What new items get: the run-wide maximum, or the error that the actor's own values give: of an n-step transition
    its absolute one, of a sequence what a learner with these values would give it."""


class Sampler(ABC):
    """A set of rows to draw from."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.count = 0
        """How many rows are in the set."""

    @abstractmethod
    def add(self, rows: Ints, priorities: Doubles | None = None) -> None:
        """Put `rows` [M], distinct and not in the set, into the set, with `priorities` [M] if they are known."""

    @abstractmethod
    def remove(self, rows: Ints) -> None:
        """Take `rows` [M], distinct, out of the set, those that are in it."""

    @abstractmethod
    def contains(self, rows: Ints) -> Bools:
        """Return which of `rows` [M] are in the set."""

    @abstractmethod
    def items(self) -> Ints:
        """Return all rows of the set in ascending order."""

    @abstractmethod
    def draw(self, size: int, beta: float) -> tuple[Ints, Floats]:
        """Return `size` rows of the set, drawn with replacement, and their importance weights (at most 1)."""

    def draw_records(self, size: int, beta: float, records: Records) -> tuple[Ints, Floats, Floats]:
        """Return `size` drawn rows as `records` reads them, and their importance weights."""
        rows, weights = self.draw(size, beta)
        return *records.read(rows), weights

    @property
    def mass(self) -> float:
        """The sum of what items are drawn in proportion to."""
        return float(self.count)

    @property
    def least(self) -> float:
        """The least that an item is drawn in proportion to."""
        return 1.0

    def update(self, rows: Ints, priorities: Floats, highest: float, overall: float = 0.0) -> int:
        """Write new finite priorities, the `highest` among them, of rows of the set; return how many were written.

        Where the set is not all, `overall` is the decayed maximum over everything; 0 where it is all.
        """
        return 0

    def metrics(self) -> dict[str, float]:
        """Return the numbers worth watching."""
        return {}

    @abstractmethod
    def state_dict(self) -> State:
        """Return the set (the generator is saved by its owner)."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`."""

    @abstractmethod
    def ledger(self) -> State:
        """Return what a later life must know besides the arrays."""

    @abstractmethod
    def recover(self, ledger: State, without: Ints) -> None:
        """Go on with the set that a former life left in the arrays, `without` [M] (repeats allowed)."""


class UniformSampler(Sampler):
    """Exactly uniform: draws from all rows ever used and rejects those that are not in the set."""

    def __init__(self, capacity: int, rng: np.random.Generator, allocate: Allocate = zeros) -> None:
        super().__init__(rng)
        self.live: Bools = allocate("sampler.live", (capacity,), np.bool_)
        self.bound = 0
        """No row at or above this one was ever added."""

    def add(self, rows: Ints, priorities: Doubles | None = None) -> None:
        """Put rows into the set."""
        self.live[rows] = True
        self.count += len(rows)
        if self.bound < len(self.live) and len(rows):
            self.bound = max(self.bound, int(rows.max()) + 1)

    def remove(self, rows: Ints) -> None:
        """Take rows out of the set."""
        self.count -= int(np.count_nonzero(self.live.take(rows)))
        self.live[rows] = False

    def contains(self, rows: Ints) -> Bools:
        """Return which rows are in the set."""
        return self.live.take(rows)

    def items(self) -> Ints:
        """Return all rows of the set in ascending order."""
        return np.flatnonzero(self.live[: self.bound])

    def draw(self, size: int, beta: float) -> tuple[Ints, Floats]:
        """Return rows, each equally likely, and weights of 1."""
        if self.count * 8 < self.bound:  # rejection would take too many rounds
            rows = self.items()[self.rng.integers(self.count, size=size)]
        else:
            rows = self._accepted(size)
            while len(rows) < size:
                rows = np.concatenate([rows, self._accepted(size - len(rows))])
            rows = rows[:size]
        return rows, np.ones(size, np.float32)

    def _accepted(self, size: int) -> Ints:
        tries = size * self.bound // self.count
        rows = self.rng.integers(self.bound, size=tries + tries // 8 + 8)
        return rows[self.live.take(rows)]

    def state_dict(self) -> State:
        """Return the set, one bit a row."""
        return {"bound": self.bound, "live": np.packbits(self.live[: self.bound])}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`."""
        self.bound = int(state["bound"])
        self.live[:] = False
        self.live[: self.bound] = np.unpackbits(state["live"], count=self.bound).astype(np.bool_)
        self.count = int(np.count_nonzero(self.live))

    def ledger(self) -> State:
        """Return the bound."""
        return {"bound": self.bound}

    def recover(self, ledger: State, without: Ints) -> None:
        """Go on with the rows that are marked."""
        self.bound = int(ledger["bound"])
        self.live[without] = False
        self.count = int(np.count_nonzero(self.live))


class PrioritisedSampler(Sampler):
    """Stratified draws from a sum tree over all rows, with exact weights (N P(i))^-beta over their maximum."""

    def __init__(
        self, config: PrioritisedConfig, capacity: int, rng: np.random.Generator, allocate: Allocate = zeros
    ) -> None:
        super().__init__(rng)
        self._alpha, self._epsilon, self._max_decay = config.alpha, config.epsilon, config.max_decay
        self.tree = make_sum_tree(capacity)
        self.tree.lie_in(allocate)  # only now: to load compiled code, a new tree writes a leaf
        self.max_priority: float | None = None
        """The decayed maximum of all priorities written; None before the first."""

    def add(self, rows: Ints, priorities: Doubles | None = None) -> None:
        """Put rows into the set, where their priorities are not known with the run-wide maximum."""
        if priorities is None:
            self.tree.set(rows, np.full(len(rows), self._new_value()))
        elif len(rows):
            self.max_priority = max(float(priorities.max()), self.max_priority or 0.0)
            self.tree.set(rows, self._values(priorities))
        self.count += len(rows)

    def remove(self, rows: Ints) -> None:
        """Take rows out of the set."""
        self.count -= int(np.count_nonzero(self.tree.get(rows)))
        self.tree.set(rows, np.zeros(len(rows)))

    def contains(self, rows: Ints) -> Bools:
        """Return which rows are in the set."""
        return self.tree.get(rows) > 0.0

    def items(self) -> Ints:
        """Return all rows of the set in ascending order."""
        return np.flatnonzero(self.tree.leaves)

    def draw(self, size: int, beta: float) -> tuple[Ints, Floats]:
        """Return one row from each of `size` equal parts of the total priority, and their weights."""
        rows, relative = self.tree.draw(self.rng.random(size))
        return rows, self._weights(relative, beta)

    def draw_records(self, size: int, beta: float, records: Records) -> tuple[Ints, Floats, Floats]:
        """Return the same as records."""
        whole, real, relative = records.draw(self.tree, self.rng.random(size))
        return whole, real, self._weights(relative, beta)

    def _weights(self, relative: Doubles, beta: float) -> Floats:
        """Return (N p / total)^-beta over its maximum, which the least likely item has: N and total cancel."""
        relative **= beta
        return relative.astype(np.float32)

    @property
    def mass(self) -> float:
        """The sum of the tree."""
        return self.tree.total

    @property
    def least(self) -> float:
        """The smallest value in the tree."""
        return self.tree.minimum

    def update(self, rows: Ints, priorities: Floats, highest: float, overall: float = 0.0) -> int:
        """Write new priorities."""
        if not len(rows):
            return 0
        first = self.max_priority is None
        self.max_priority = overall or max(highest, (self.max_priority or 0.0) * self._max_decay)
        if first:
            # what was stored before any priority was known had a placeholder of no meaning beside real ones
            items = self.items()
            self.tree.set(items, np.full(len(items), self._new_value()))
        self.tree.set(rows, self._values(priorities))
        return len(rows)

    def _values(self, priorities: Floats | Doubles) -> Doubles:
        values: Doubles = priorities.astype(np.float64)
        values += self._epsilon
        values **= self._alpha
        return values

    def _new_value(self) -> float:
        priority = 1.0 if self.max_priority is None else self.max_priority
        return float(self._values(np.array([priority]))[0])

    def metrics(self) -> dict[str, float]:
        """Return the maximum that new items get and the mean of the tree's values."""
        return {"priority_max": self.max_priority or 1.0, "priority_mean": self.tree.total / max(self.count, 1)}

    def state_dict(self) -> State:
        """Return the set, one bit a row up to the last, with the values of its leaves, and the maximum."""
        live = self.tree.leaves > 0.0
        bound = len(live) - int(np.argmax(live[::-1])) if self.count else 0
        values = self.tree.leaves[:bound][live[:bound]]
        return {"live": np.packbits(live[:bound]), "values": values, "max_priority": self.max_priority}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`."""
        leaves = np.zeros(self.tree.capacity)
        # earlier checkpoints have the numbers of the rows
        items = state["items"] if "items" in state else np.flatnonzero(np.unpackbits(state["live"]))
        leaves[items] = state["values"]
        self.tree.rebuild(leaves)
        self.count = len(items)
        self.max_priority = state["max_priority"]

    def ledger(self) -> State:
        """Return the maximum."""
        return {"max_priority": self.max_priority}

    def recover(self, ledger: State, without: Ints) -> None:
        """Go on with the leaves; a death in the middle of this changes nothing for the next life."""
        self.max_priority = ledger["max_priority"]
        self.tree.leaves[without] = 0.0
        self.tree.resum()
        self.count = int(np.count_nonzero(self.tree.leaves))


def make_sampler(
    config: UniformConfig | PrioritisedConfig, capacity: int, rng: np.random.Generator, allocate: Allocate
) -> Sampler:
    """Return the sampler that `config` describes, for rows below `capacity`, its arrays from `allocate`."""
    if isinstance(config, PrioritisedConfig):
        return PrioritisedSampler(config, capacity, rng, allocate)
    return UniformSampler(capacity, rng, allocate)
