"""When an item's whole window is there: n-step transitions and sequences, followed row by row in every stream.

The only place that knows episodes. Row by row, `arrive` says which earlier rows are complete now; what is never said
here (a row before a crash, a final row) is never sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from pydantic import Field, model_validator

from qfleet.core.config import Config
from qfleet.core.role import State
from qfleet.core.types import Bools, Ints
from qfleet.replay.segments import NONE, grown
from qfleet.replay.sumtree import Doubles


class SequenceWindow(Config):
    """How episodes are cut into overlapping sequences."""

    length: int = Field(80, gt=0)
    """Rows of a sequence, burn-in included; one more observation follows for the bootstrap."""
    burn_in: int = Field(0, ge=0)
    """Leading rows that only warm the recurrent state up; an episode's last piece no longer than this is no item.
    An episode's first rows need no burn-in: a whole episode is an item, however short."""
    period: int = Field(40, gt=0)
    """Rows from one sequence's start to the next one's."""

    @model_validator(mode="after")
    def _burn_in_leaves_rows(self) -> SequenceWindow:
        if self.burn_in >= self.length:
            raise ValueError(f"burn_in ({self.burn_in}) must be smaller than length ({self.length})")
        return self


@dataclass(frozen=True)
class Arrival:
    """One group of rows, at most one of each stream."""

    stream: Ints  # [E]
    row: Ints  # [E] where they were stored
    reward: Doubles  # [E]
    ended: Bools  # [E] the transition that leaves the row ended the episode, by rule or limit
    terminated: Bools  # [E] by rule
    final: Bools  # [E]
    value: Doubles | None = None  # [E] the actor's value of what it did
    best: Doubles | None = None  # [E] the actor's highest value


@dataclass(frozen=True)
class Completed:
    """Items whose window is there now."""

    row: Ints  # [M]
    bootstrap: Ints  # [M] the row after the window
    steps: Ints  # [M] rows of the window
    terminated: Bools  # [M] the window ended in termination: there is nothing to bootstrap from
    returns: Doubles | None  # [M] discounted sum of the window's rewards; None for sequences
    value: Doubles | None = None  # [M] the actor's value of the first row's action
    best: Doubles | None = None  # [M] the actor's highest value at the row after the window


class Windows(ABC):
    """The open windows of every stream, newest first, and how far its episode is."""

    def __init__(self, streams: int, open_windows: int) -> None:
        self.age = np.zeros(streams, np.int64)
        """Rows of the current episode so far; 0 means that the next row starts one."""
        self.ended = np.zeros(streams, np.bool_)
        """Whether the next row must be a final one."""
        self.terminated = np.zeros(streams, np.bool_)
        self.pending = np.full((streams, open_windows), NONE, np.int64)
        """The rows whose windows are open."""

    def grow(self, streams: int) -> None:
        """Make room for streams below `streams`."""
        self.age, self.pending = grown(self.age, streams, 0), grown(self.pending, streams, NONE)
        self.ended, self.terminated = grown(self.ended, streams, False), grown(self.terminated, streams, False)

    def cut(self, streams: Ints) -> None:
        """End the episodes of `streams` without an end: their open windows never complete, the next row is a start."""
        self.age[streams] = 0
        self.ended[streams] = self.terminated[streams] = False
        self.pending[streams] = NONE

    def forget(self, streams: Ints, first: Ints, last: Ints) -> None:
        """Drop the open windows of each of `streams` [M] (repeats allowed) that start in the rows first..last [M]."""
        for stream, low, high in zip(streams, first, last, strict=True):
            pending = self.pending[stream]
            pending[(pending >= low) & (pending <= high)] = NONE

    @abstractmethod
    def arrive(self, arrival: Arrival) -> Completed:
        """Take a group of rows in; return the items that they complete."""

    def _follow(self, arrival: Arrival) -> Ints:
        """Check that finals come exactly after episode ends; move the episodes on; return the rows' ages [E]."""
        stream = arrival.stream
        if (self.ended.take(stream) != arrival.final).any():
            wrong = stream[self.ended[stream] != arrival.final]
            raise ValueError(
                f"experience of streams {wrong.tolist()}: the row after an episode's last transition must be final, "
                f"and no other; a stream that broke off must be named in `cut`"
            )
        age = self.age.take(stream)
        self.age[stream] = np.where(arrival.final, 0, age + 1)
        return age

    def _end(self, arrival: Arrival) -> None:
        self.ended[arrival.stream] = arrival.ended
        self.terminated[arrival.stream] = arrival.terminated

    def state_dict(self) -> State:
        """Return all arrays."""
        return {name: array.copy() for name, array in vars(self).items() if name in self._arrays()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`."""
        for name in self._arrays():
            setattr(self, name, np.array(state[name]))

    def ledger(self) -> State:
        """Return what a later life must know, for its `load_state_dict`: the arrays themselves, not copies."""
        return {name: getattr(self, name) for name in self._arrays()}

    def _arrays(self) -> tuple[str, ...]:
        return ("age", "ended", "terminated", "pending")


class NStepWindows(Windows):
    """Every row is a start; its window is n rows, or what is left of the episode."""

    def __init__(self, streams: int, n_step: int, gamma: float, valued: bool = False) -> None:
        """Follow `streams` streams; `valued` says whether rows come with the actor's values."""
        super().__init__(streams, n_step)
        self.n_step = n_step
        self.powers = gamma ** np.arange(n_step + 1, dtype=np.float64)
        self.sums = np.zeros((streams, n_step), np.float64)
        """The discounted rewards so far of the windows in `pending`."""
        self.values = np.zeros((streams if valued else 0, n_step), np.float64)
        """The actor's values of the actions that begin the windows in `pending`, where rows come with such."""
        self.valued = valued
        self._oldest = np.arange(n_step) == n_step - 1

    def grow(self, streams: int) -> None:
        """Make room for streams below `streams`."""
        super().grow(streams)
        self.sums = grown(self.sums, streams, 0)
        if self.valued:
            self.values = grown(self.values, streams, 0)

    def arrive(self, arrival: Arrival) -> Completed:
        """Take a group of rows in; return the items that they complete."""
        self._follow(arrival)
        stream, row, final = arrival.stream, arrival.row, arrival.final
        pending, sums = self.pending.take(stream, axis=0), self.sums.take(stream, axis=0)
        complete = (self._oldest | final[:, None]) & (pending >= 0)
        which, column = complete.nonzero()
        completed = Completed(
            pending[which, column],
            row.take(which),
            column + 1,
            self.terminated[stream.take(which)],
            sums[which, column],
            *self._value(arrival, which, column),
        )
        pending[:, 1:] = pending[:, :-1]
        pending[:, 0] = row
        pending[final] = NONE
        # column j now holds the row j before this one, which this reward reaches discounted by gamma^j
        sums[:, 1:] = sums[:, :-1]
        sums[:, 0] = 0.0
        sums += arrival.reward[:, None] * self.powers[:-1]
        self.pending[stream], self.sums[stream] = pending, sums
        self._end(arrival)
        return completed

    def _value(self, arrival: Arrival, which: Ints, column: Ints) -> tuple[Doubles | None, Doubles | None]:
        """Return the actor's values [M] at the beginning and after the end of completed windows; note the new ones."""
        if arrival.value is None or arrival.best is None:
            return None, None
        values = self.values.take(arrival.stream, axis=0)
        first = values[which, column]
        values[:, 1:] = values[:, :-1]
        values[:, 0] = arrival.value
        self.values[arrival.stream] = values
        return first, arrival.best.take(which)

    def _arrays(self) -> tuple[str, ...]:
        return (*super()._arrays(), "sums", *(("values",) if self.valued else ()))


class SequenceWindows(Windows):
    """Every `period`-th row of an episode is a start; its window is `length` rows, or what is left of the episode."""

    def __init__(self, streams: int, window: SequenceWindow) -> None:
        super().__init__(streams, -(-window.length // window.period))
        self.window = window

    def arrive(self, arrival: Arrival) -> Completed:
        """Take a group of rows in; return the items that they complete."""
        age = self._follow(arrival)
        stream, row, final, window = arrival.stream, arrival.row, arrival.final, self.window
        pending = self.pending.take(stream, axis=0)
        # column j holds the j-th last start before this row: a multiple of the period, this many rows back
        newest = (age - 1) // window.period
        steps = age[:, None] - window.period * (newest[:, None] - np.arange(pending.shape[1]))
        long_enough = (steps > window.burn_in) | (steps == age[:, None])
        complete = (pending >= 0) & ((steps == window.length) | (final[:, None] & long_enough))
        which, column = complete.nonzero()
        completed = Completed(
            pending[which, column],
            row.take(which),
            steps[which, column],
            self.terminated[stream.take(which)],
            None,
        )
        pending[complete] = NONE
        start = age % window.period == 0
        shifted = np.concatenate([row[:, None], pending[:, :-1]], axis=1)
        pending = np.where(start[:, None], shifted, pending)
        pending[final] = NONE
        self.pending[stream] = pending
        self._end(arrival)
        return completed
