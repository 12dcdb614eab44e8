"""The replay of one shard: takes experience in, gives batches out; see `Replay`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from qfleet.core.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.role import State
from qfleet.core.seeding import numpy_state, restore_numpy
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.core.types import Batch, Bools, Experience, Floats, Ints, Priorities, SequenceBatch, Standing, Version
from qfleet.replay.allocation import Allocate, zeros
from qfleet.replay.rewards import RewardScale
from qfleet.replay.samplers import PrioritisedConfig, UniformConfig, make_sampler
from qfleet.replay.segments import NONE, Chains
from qfleet.replay.storage import Lz4Config, MappedConfig, RamConfig
from qfleet.replay.store import RowStore
from qfleet.replay.sumtree import Doubles
from qfleet.replay.windows import Arrival, Completed, NStepWindows, SequenceWindow, SequenceWindows, Windows

_NO_EXTRAS: Mapping[str, LeafSpec] = MappingProxyType({})
_ALL = Fraction(1)

Judge = Callable[[SequenceBatch, Floats, Floats], Floats]
"""What gives new sequences [B], without their observations, a priority [B] from the actor's values: those [B, L] of
what it did, and the highest [B, L + 1] of each observation."""


def batch_of(fields: dict[str, Any]) -> Batch:
    """Return a batch from all of its fields, without the generated __init__ of a frozen dataclass.

    That one sets field by field and costs as much as the rest of a small batch's assembly.
    """
    made = object.__new__(Batch)
    object.__setattr__(made, "__dict__", fields)
    return made


class ReplayConfig(Config):
    """How much is remembered, where, and what is drawn from it."""

    capacity: int = Field(100_000, gt=0, lt=2**31)
    """Rows of the whole run (an environment step each, one more at an episode's end), which the shards share in
    proportion to their actors, each rounding its part down to whole segments."""
    shards: int = Field(1, gt=0, le=1024)
    """How many replays of their own the actors are dealt out among; each is a role, in a process of its own where roles
    have such. Batches come from all of them in proportion to what they hold. With elastic.max_shards there are so many
    replays, and this is in how many processes they are at first."""
    sampler: Annotated[UniformConfig | PrioritisedConfig, Field(discriminator="kind")] = UniformConfig()
    """Which items a batch takes."""
    storage: Annotated[RamConfig | MappedConfig | Lz4Config, Field(discriminator="kind")] = RamConfig()
    """Where observations are kept."""
    segment: int | None = Field(None, gt=0)
    """Rows that are written, and later dropped, together; None chooses from capacity and number of environments."""
    mirror: Literal["auto", "on", "off"] = "auto"
    """Keep a copy of all observations in the memory of the learner's device, so that each goes there once and batches
    are gathered there (placement processes, storage ram, one shard); auto does so where a GPU has room for it."""

    def layout(self, streams: int, shortest: int, part: Fraction = _ALL) -> tuple[int, int]:
        """Return (segments, rows of each) for `streams` environments and segments of at least `shortest` rows.

        `part` is how much of the capacity a shard has.
        """
        capacity = int(self.capacity * part)
        rows = self.segment or min(max(capacity // (16 * streams), shortest, 4), 1024)
        if rows < shortest:
            raise ConfigError(f"replay.segment is {rows} rows; the frame stack of this environment needs {shortest}")
        segments = capacity // rows
        if segments <= streams:
            whose = "" if part == _ALL else f", of which a shard has {capacity:,},"
            raise ConfigError(
                f"replay.capacity of {self.capacity:,} rows{whose} makes {segments} segments of {rows} rows, but "
                f"{streams} environments each fill one: raise replay.capacity to "
                f"{math.ceil((streams + 1) * rows / part):,} or more"
            )
        return segments, rows


class Replay:
    """Rows of many streams in fixed-size segments, sampled as n-step transitions or as sequences.

    An item is sampleable exactly while its whole window and frame stack are stored. The same random generator, the
    same experience and the same calls give the same batches, to the bit, also through `state_dict`.
    """

    def __init__(
        self,
        config: ReplayConfig,
        spec: EnvSpec,
        *,
        streams: int,
        n_step: int,
        gamma: float,
        rng: np.random.Generator,
        part: Fraction = _ALL,
        sequence: SequenceWindow | None = None,
        judge: Judge | None = None,
        extras: Mapping[str, LeafSpec] = _NO_EXTRAS,
        directory: Path | None = None,
        normalise_rewards: bool = False,
        allocate: Allocate | None = None,
        life: int = 0,
    ) -> None:
        """Make an empty replay for about `streams` environments of `spec`, with its `part` of the run's capacity.

        With `sequence`, items are sequences of single steps and `n_step` is not used; `judge` is needed where they
        get their first priorities from the actor's values. `extras` describes further per-row arrays. `directory` is
        where the mapped tier puts its files. With `allocate` the rows outlive this process: a replay of a `life` after
        the first finds them there and goes on by `recover`.
        """
        self.config, self.spec, self.rng, self.sequence, self._judge = config, spec, rng, sequence, judge
        stack = max(leaf.stack for leaf in spec.observations.values())
        segments, rows = config.layout(streams, max(stack - 1, 1), part)
        self.capacity = segments * rows
        self.chains = Chains(segments, rows, streams, self._evict, allocate or zeros)
        self.valued = isinstance(config.sampler, PrioritisedConfig) and config.sampler.initial == "actor"
        """Whether rows come with the actor's values, from which items get their first priorities."""
        self.windows: Windows = (
            SequenceWindows(streams, sequence) if sequence else NStepWindows(streams, n_step, gamma, self.valued)
        )
        self.powers = gamma ** np.arange(n_step + 1, dtype=np.float64)
        prioritised = isinstance(config.sampler, PrioritisedConfig)
        kept = (bool(sequence), prioritised, self.valued)
        self.store = RowStore(config.storage, spec, self.chains, *kept, extras, directory, allocate, life)
        self.sampler = make_sampler(config.sampler, self.capacity, rng, allocate or zeros)
        self.rewards = RewardScale(streams, gamma) if normalise_rewards else None
        self.version = Version()
        self.seen: dict[str, int] = {}
        """The last sequence number of each sender."""
        self.counts = {"inserted": 0, "duplicates": 0, "stale_priorities": 0}

    def __len__(self) -> int:
        """Return the number of sampleable items."""
        return self.sampler.count

    # ------------------------------------------------------------------ experience in

    def append(self, experience: Experience) -> int:
        """Store a message; return its number of transitions (rows that are not final), 0 if it was stored before.

        A sender's messages must come in order; numbers left out mean nothing.
        """
        if experience.sequence <= self.seen.get(experience.source, -1):
            self.counts["duplicates"] += 1
            return 0
        self.store.check_message(experience)
        if (experience.value is not None) != self.valued or (experience.best is not None) != self.valued:
            raise ValueError(
                f"experience of {experience.source}: values must come exactly when replay.sampler.initial is 'actor'"
            )
        self.seen[experience.source] = experience.sequence
        self.version = max(self.version, experience.version)
        highest = max(experience.stream.max(initial=-1), experience.cut.max(initial=-1)) + 1
        if highest > len(self.chains.tail):
            for part in (self.chains, self.windows, self.rewards):
                if part is not None:
                    part.grow(int(highest))
        if len(experience.cut):
            self.windows.cut(experience.cut)
            if self.rewards:
                self.rewards.cut(experience.cut)
        offsets = experience.offsets.tolist()
        for first, last in pairwise(offsets):
            if last > first:
                self._append_group(experience, slice(first, last))
        stored = len(experience.final) - int(np.count_nonzero(experience.final))
        self.counts["inserted"] += stored
        return stored

    def _append_group(self, experience: Experience, group: slice) -> None:
        """Store rows of distinct streams."""
        stream, reward = experience.stream[group], experience.reward[group].astype(np.float64)
        final, terminated = experience.final[group], experience.terminated[group]
        ended = terminated | experience.truncated[group]
        rows = self.chains.advance(stream)
        self.store.put(rows, self.windows.age.take(stream), experience, group)
        if self.rewards:
            going = ~final
            self.rewards.observe(stream[going], reward[going], ended[going])
        value = best = None
        if experience.value is not None and experience.best is not None:
            value, best = (part[group].astype(np.float64) for part in (experience.value, experience.best))
        completed = self.windows.arrive(Arrival(stream, rows, reward, ended, terminated, final, value, best))
        if len(completed.row):
            self._complete(completed)

    def _complete(self, completed: Completed) -> None:
        """Keep what the completed windows came to, and make their items sampleable where the frames are there."""
        rows, priorities = completed.row, None
        if completed.returns is None:
            self.store.write("steps", rows, completed.steps)
            priorities = self._judged(rows) if self.valued and len(rows) else None
        else:
            discount = np.where(completed.terminated, 0.0, self.powers.take(completed.steps))
            self.store.records.write_window(rows, completed.bootstrap, completed.returns, discount)
            priorities = self._errors(completed, discount)
        if self.store.stack > 1:
            present = self.store.frames_present(rows)
            rows, priorities = rows[present], None if priorities is None else priorities[present]
        self.sampler.add(rows, priorities)

    def _errors(self, completed: Completed, discount: Doubles) -> Doubles | None:
        """Return how wrong the actor's values were about the completed windows [M]; None if it sent none."""
        if completed.returns is None or completed.value is None or completed.best is None:
            return None
        scale = self.rewards.scale if self.rewards else 1.0
        errors = np.abs(completed.returns / scale + discount * completed.best - completed.value)
        return np.nan_to_num(errors, posinf=0.0)  # a broken value must not break the tree

    def _judged(self, starts: Ints) -> Doubles:
        """Return the priorities [M] that the actor's values give to completed sequences."""
        assert self._judge is not None
        rows, valid = self._sequence_rows(starts)
        steps = self._steps(starts, rows, valid, np.ones(len(starts), np.float32))
        value, best = self.store.read_valid("value", rows[:, :-1], valid), self.store.read("best", rows)
        return np.nan_to_num(self._judge(steps, value, best).astype(np.float64), posinf=0.0)

    def _evict(self, segments: Ints) -> None:
        """Stop sampling what the loss of `segments` makes incomplete; a checkpoint may still have to write them."""
        self.store.chunks.preserve(segments)
        size = self.chains.rows
        first = segments * size
        self.sampler.remove((first[:, None] + np.arange(size)).ravel())
        self.windows.forget(self.chains.owner[segments], first, first + size - 1)
        after = self.chains.next[segments]
        after = after[after != NONE]
        if self.store.stack > 1 and len(after):
            offset = np.arange(self.store.stack - 1)
            rows = (after[:, None] * size + offset).ravel()
            # only rows that reach back over the segment's beginning within their episode
            self.sampler.remove(rows[self.store.read("age", rows) > np.tile(offset, len(after))])

    # ------------------------------------------------------------------ batches out

    def sample(self, size: int, beta: float = 0.4, updates: int = 1) -> Batch:
        """Return `size` n-step transitions for each of some updates; `beta` is the exponent of the importance weights.

        What they are drawn from is the same for all of them, and so is what each of them gets of every part of it.
        """
        self._check_sampling(sequences=False)
        whole, real, weight = self.sampler.draw_records(size * updates, beta, self.store.records)
        if updates == 1:
            return self._batch(whole, real, weight)
        dealt = np.arange(size * updates).reshape(size, updates).T.reshape(-1)
        return self._batch(whole[:, dealt], real[:, dealt], weight[dealt], updates)

    def transitions(self, rows: Ints, weight: Floats) -> Batch:
        """Return the items at `rows` [B], which must be sampleable, as a batch."""
        return self._batch(*self.store.records.read(rows), weight)

    def _batch(self, whole: Ints, real: Floats, weight: Floats, updates: int = 1) -> Batch:
        """Return the transitions whose records were read as `whole` [4, B] and `real` [2, B]."""
        (reward, discount), scale = real, 1.0
        if self.rewards:
            scale = self.rewards.scale
            reward = reward / np.float32(scale)
        both = whole[2:].reshape(-1)  # the rows, then those that they bootstrap from
        observation, next_observation = self.store.observe_pairs(both)
        masks = self.store.read("mask", both) if self.spec.masked else None
        size = len(weight)
        return batch_of(
            {
                "observation": observation,
                "action": whole[0],
                "reward": reward,
                "discount": discount,
                "next_observation": next_observation,
                "weight": weight,
                "index": whole[2],
                "generation": whole[1],
                "mask": None if masks is None else masks[:size],
                "next_mask": None if masks is None else masks[size:],
                "version": self.version,
                "reward_scale": scale,
                "global_size": size,
                "updates": updates,
                "draw": 0,
                "fresh": self.store.take_fresh(),
                "shard": 0,
                "least": 1.0,
                "beta": 0.0,
                "standings": (),
                "parts": 1,
            }
        )

    def sample_sequences(self, size: int, beta: float = 0.4) -> SequenceBatch:
        """Return `size` sequences; `beta` is the exponent of the importance weights."""
        self._check_sampling(sequences=True)
        return self.sequences(*self.sampler.draw(size, beta))

    def sequences(self, starts: Ints, weight: Floats) -> SequenceBatch:
        """Return the sequences that start at `starts` [B], which must be sampleable.

        After an episode's end the observation repeats the final one, and the rest is zero and not valid.
        """
        rows, valid = self._sequence_rows(starts)
        return dataclasses.replace(
            self._steps(starts, rows, valid, weight),
            observation=self.store.observe(rows),
            mask=self.store.read("mask", rows) if self.spec.masked else None,
        )

    def _sequence_rows(self, starts: Ints) -> tuple[Ints, Bools]:
        """Return the rows [B, T + 1] of the sequences that start at `starts` [B], and which are steps of them [B, T].

        The last of them is repeated where an episode ends before.
        """
        assert self.sequence is not None
        steps = self.store.read("steps", starts)[:, None]
        ahead = np.arange(self.sequence.length + 1)
        return self.chains.successor(starts, np.minimum(ahead, steps)), ahead[:-1] < steps

    def _steps(self, starts: Ints, rows: Ints, valid: Bools, weight: Floats) -> SequenceBatch:
        """Return what was done in sequences and what came of it, without what was seen."""
        taken = np.where(valid, rows[:, :-1], rows[:, :1])
        reward: Floats = self.store.read_valid("reward", taken, valid)
        scale = self.rewards.scale if self.rewards else 1.0
        if self.rewards:
            reward = reward / np.float32(scale)
        return SequenceBatch(
            observation={},
            action=self.store.read_valid("action", taken, valid).astype(np.int64),
            reward=reward,
            terminated=self.store.read_valid("terminated", taken, valid),
            valid=valid,
            extras={name: self.store.read(f"extras.{name}", starts) for name in self.store.extras},
            weight=weight,
            index=starts,
            generation=self.chains.generation.take(starts // self.chains.rows),
            version=self.version,
            reward_scale=scale,
            global_size=len(starts),
        )

    def _check_sampling(self, sequences: bool) -> None:
        if sequences != (self.sequence is not None):
            kind, method = ("sequences", "sample_sequences") if self.sequence else ("transitions", "sample")
            raise ValueError(f"this replay holds {kind}: call {method}()")
        if not self.sampler.count:
            raise ValueError("nothing to sample yet: no item of this replay is complete")

    @property
    def standing(self) -> Standing:
        """How much there is to draw from."""
        return Standing(self.sampler.mass, self.sampler.least)

    def update_priorities(self, priorities: Priorities) -> int:
        """Write the priorities of sampled items that are still there; return how many those were."""
        highest = self.store.records.highest(priorities)
        if self.store.stack > 1 or math.isnan(highest):
            return self._update_some(priorities)
        return self.sampler.update(priorities.index, priorities.priority, highest, priorities.highest)

    def _update_some(self, priorities: Priorities) -> int:
        """Write the priorities that are finite and whose items are still there."""
        index, values = priorities.index, priorities.priority
        current = self.chains.current(index, priorities.generation)
        if self.store.stack > 1:  # an item may have lost frames to an eviction although its own segment is there
            current &= self.sampler.contains(index)
        self.counts["stale_priorities"] += len(index) - int(np.count_nonzero(current))
        current &= np.isfinite(values)
        index, values = index[current], values[current]
        return self.sampler.update(index, values, float(values.max(initial=0.0)), priorities.highest)

    # ------------------------------------------------------------------ numbers and state

    def metrics(self) -> dict[str, float]:
        """Return the numbers worth watching."""
        scale = {"reward_scale": self.rewards.scale} if self.rewards else {}
        return {
            "replay_size": float(len(self)),
            "replay_fill": self.chains.used_rows / self.capacity,
            **{f"replay_{name}": float(count) for name, count in self.counts.items()},
            **{f"replay_{name}": value for name, value in self.sampler.metrics().items()},
            **scale,
        }

    def state_dict(self) -> State:
        """Return everything; rows are chunks, which are read when they are saved, whatever is appended meanwhile."""
        return {
            "store": self.store.state_dict(self.windows.pending),
            "chains": self.chains.state_dict(),
            "windows": self.windows.state_dict(),
            "sampler": self.sampler.state_dict(),
            "rewards": self.rewards.state_dict() if self.rewards else None,
            "rng": numpy_state(self.rng),
            "version": self.version,
            "seen": dict(self.seen),
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` of a replay with the same settings returned."""
        self.store.check_state(state["store"])
        self.chains.load_state_dict(state["chains"])
        self.windows.load_state_dict(state["windows"])
        self.store.load_state_dict(state["store"], self.windows.pending)
        self.sampler.load_state_dict(state["sampler"])
        if self.rewards:
            self.rewards.load_state_dict(state["rewards"])
        restore_numpy(self.rng, state["rng"])
        self.version = state["version"]
        self.seen = dict(state["seen"])
        self.counts = dict(state["counts"])

    # ------------------------------------------------------------------ what a later life needs

    def ledger(self) -> State:
        """Return everything small: with the arrays of `allocate` it is this replay. Arrays in it are not copies."""
        return {
            "chains": self.chains.ledger(),
            "windows": self.windows.ledger(),
            "sampler": self.sampler.ledger(),
            "rewards": self.rewards.ledger() if self.rewards else None,
            "version": self.version,
            "seen": self.seen,
            "counts": self.counts,
        }

    def recover(self, ledger: State) -> None:
        """Be the replay that `ledger` is of, whatever its process did to the arrays after that before it died.

        What was appended since then must be appended again. Segments that were handed out since then are evicted: they
        are the oldest, and next in line anyway.
        """
        overwritten = self.chains.recover(ledger["chains"])
        self.windows.load_state_dict(ledger["windows"])
        if self.rewards:
            self.rewards.load_state_dict(ledger["rewards"])
        self.version, self.seen, self.counts = ledger["version"], dict(ledger["seen"]), dict(ledger["counts"])
        self.sampler.recover(ledger["sampler"], self._incomplete(overwritten))
        self.chains.drop(overwritten)
        self.store.recover()

    def _incomplete(self, overwritten: Ints) -> Ints:
        """Return all rows that were no items by the ledger and may have become some since then (repeats occur)."""
        size = self.chains.rows
        opened = self.chains.next_row[self.chains.next_row != NONE]
        segments = np.concatenate([overwritten, opened // size])
        rows = segments[:, None] * size + np.arange(size)
        first = np.concatenate([overwritten * size, opened])
        pending = self.windows.pending[self.windows.pending != NONE]
        return np.concatenate([rows[rows >= first[:, None]], pending])
