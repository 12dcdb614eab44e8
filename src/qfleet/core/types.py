"""The messages that roles send to each other: frozen, made of arrays and plain values, given up by the sender.

Shapes: R rows, B batch items, T time steps, E environments, A actions, P parameters. A dot-dot-dot is one leaf's shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Leaves = dict[str, Array]
"""The arrays of an observation by leaf name; see `core.spec.EnvSpec.observations`."""


@dataclass(frozen=True, order=True)
class Version:
    """Which weights: the epoch counts learner groups (0 is the first), the number the batches learned from."""

    epoch: int = 0
    number: int = 0


@dataclass(frozen=True)
class Experience:
    """Rows of several streams, from an actor to a replay shard.

    A row is an observation with what was done there and what came of it. When an episode ends, one more row (`final`)
    holds the observation after the last action and nothing else of meaning. Rows are grouped in time order:
    within a group (`offsets[g]:offsets[g + 1]`) no stream occurs twice.
    """

    source: str
    sequence: int
    """Counts this sender's messages from 0, so that a message sent twice is stored once."""
    version: Version
    """The weights that chose the actions."""
    offsets: Ints  # [G + 1]
    stream: Ints  # [R] run-wide environment number
    observation: Leaves  # [R, ...] single frames (`LeafSpec.frame_shape`), dtype of the leaf
    action: Ints  # [R]
    reward: Floats  # [R] of the transition that leaves this row
    terminated: Bools  # [R] that transition ended the episode by the environment's rules
    truncated: Bools  # [R] that transition was cut by a limit; its successor's value still counts
    final: Bools  # [R] this row is the observation after an episode's end
    mask: Bools | None = None  # [R, A] allowed actions
    cut: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Streams that broke off before these rows (a crash, an inexact resume): their last row never becomes a start."""
    extras: Leaves = field(default_factory=dict)
    """Further per-row arrays that are stored and returned with the sequence that starts there: a recurrent state."""
    value: Floats | None = None  # [R] the actor's value of the action; replay makes first priorities of these two
    best: Floats | None = None  # [R] the actor's highest value at this row, a final one included


@dataclass(frozen=True)
class Batch:
    """Transitions for one update or a few, from a replay shard to a learner rank; arrays are contiguous."""

    observation: Leaves  # [B, ...] stacked
    action: Ints  # [B]
    reward: Floats  # [B] n-step return
    discount: Floats  # [B] gamma^k, or 0 where the window ended in termination
    next_observation: Leaves  # [B, ...] stacked, k steps later
    weight: Floats  # [B] importance weights, 1 for uniform sampling
    index: Ints  # [B] where the items live in the shard
    generation: Ints  # [B] stamp of the storage at sampling, so that a late priority is dropped
    mask: Bools | None = None  # [B, A]
    next_mask: Bools | None = None  # [B, A]
    version: Version = Version()
    """The newest weights among the actors that fed the shard."""
    reward_scale: float = 1.0
    """What the rewards were divided by (running reward normalisation)."""
    global_size: int = 0
    """Size of the whole batch over all learner ranks; the loss is a sum divided by this."""
    updates: int = 1
    """How many updates are made from it, one after the other, each from an equal part of its items, in their order."""
    draw: int = 0
    """Updates that its shard had drawn for, with these: the parts of one draw have the same."""
    fresh: Ints | None = None  # [F]
    """For a learner that has a copy of the shard's rows: those written since the last batch. The observations are then
    the rows where they lie, [B, S] for stacks of S frames or [B], and -1 is a frame of zeros."""
    shard: int = 0
    """Which shard sent this, and gets the priorities back."""
    least: float = 1.0
    """The least value that an item of the shard is drawn in proportion to; an item of that value has the weight 1."""
    beta: float = 0.0
    """The exponent of the importance weights."""
    standings: tuple[Standing, ...] = ()
    """What each of several shards had to draw from, as far as this one knew; empty for the only shard. All ranks read
    off it which shard is next, so that they take batches in one order without asking each other."""
    parts: int = 1
    """How many replicas the draw was shared out to."""


@dataclass(frozen=True)
class SequenceBatch:
    """Sequences for one update of a recurrent agent."""

    observation: Leaves  # [B, T + 1, ...] stacked
    action: Ints  # [B, T]
    reward: Floats  # [B, T] single-step
    terminated: Bools  # [B, T]
    valid: Bools  # [B, T] false after the episode's end
    extras: Leaves  # [B, ...] as stored by the actor with the first step: its recurrent state
    weight: Floats  # [B]
    index: Ints  # [B]
    generation: Ints  # [B]
    mask: Bools | None = None  # [B, T + 1, A]
    version: Version = Version()
    reward_scale: float = 1.0
    """What the rewards were divided by (running reward normalisation)."""
    global_size: int = 0
    draw: int = 0
    shard: int = 0
    least: float = 1.0
    beta: float = 0.0
    standings: tuple[Standing, ...] = ()
    parts: int = 1


@dataclass(frozen=True)
class Rollout:
    """T consecutive ticks of E environments, from an actor to a learner that needs no replay."""

    version: Version
    observation: Leaves  # [T + 1, E, ...] stacked; row T is where the next rollout begins
    action: Ints  # [T, E]
    reward: Floats  # [T, E]
    terminated: Bools  # [T, E]
    truncated: Bools  # [T, E]
    valid: Bools  # [T, E] false where the tick was only a reset
    final_observation: Leaves  # [F, ...] stacked: observations after the episodes that ended in these ticks
    final_at: Ints  # [F, 2] their (t, e)
    mask: Bools | None = None  # [T + 1, E, A]
    final_mask: Bools | None = None  # [F, A]


@dataclass(frozen=True)
class Priorities:
    """New priorities of sampled items, from a learner to the replay shard that sent them."""

    index: Ints  # [B]
    generation: Ints  # [B]
    priority: Floats  # [B] absolute errors, before the exponent
    shard: int = 0
    """Which shard drew them."""
    highest: float = 0.0
    """The decayed maximum over all shards, which new items get; 0 where one shard is all and knows it by itself."""


@dataclass(frozen=True)
class Standing:
    """How much a replay shard has to draw from, for the other shards (latest value), which tell the learners."""

    mass: float
    """The sum of the values that its items are drawn in proportion to; their number for uniform sampling."""
    least: float
    """The smallest of these values; 1 for uniform sampling."""


@dataclass(frozen=True)
class Weights:
    """A network's parameters and buffers in one flat array."""

    version: Version
    flat: Floats  # [P]
    checksum: int
    """Of `flat`: see `algo.flat.checksum`."""
    env_steps: int = 0
    """How far the run was when these were published."""
    reward_scale: float = 1.0
    """What rewards were divided by while these were learned (running reward normalisation)."""


@dataclass(frozen=True)
class InferenceRequest:
    """Observations whose values an actor wants, from one of its groups of environments to an inference server."""

    sequence: int
    """Counts this group's requests, so that one sent twice is answered once, and an answer to another one is known."""
    observation: Leaves  # [E, ...] stacked
    state: Floats | None = None  # [E, S] what a recurrent agent remembers


@dataclass(frozen=True)
class InferenceReply:
    """The values of one request, from an inference server."""

    sequence: int
    """That of the request."""
    version: Version
    """The weights that made the values."""
    q: Floats  # [E, A]
    state: Floats | None = None  # [E, S] the memory after these observations, whose last action is still to be set


@dataclass(frozen=True)
class Evaluated:
    """The result of one evaluation on validation seeds."""

    version: Version
    env_steps: int
    returns: NDArray[np.float64]  # [episodes]
    lengths: Ints  # [episodes]
    seconds: float
    """What the evaluation itself cost, so that it can be left out of a run's training time."""
    best: bool
    """Whether no earlier evaluation had a higher mean."""
    weights: Weights | None = None
    """The weights, when they are the best so far."""


@dataclass(frozen=True)
class Orders:
    """How the balancer wants the run's work to be shared, from the monitor to all actors and inference servers."""

    envs: tuple[int, ...]
    """By actor: how many of its environments it acts for; the others rest where they are."""
    deadlines_ms: tuple[float, ...] = ()
    """By inference server: how long an observation waits for others at most; empty where actors ask none."""

    @property
    def served(self) -> bool:
        """Whether actors that can do both ask inference servers rather than networks of their own."""
        return bool(self.deadlines_ms)


@dataclass(frozen=True)
class Notice:
    """Something a person should know: written to events.jsonl and shown."""

    role: str
    index: int
    kind: str
    text: str


MESSAGES: tuple[type, ...] = (
    Version, Experience, Batch, SequenceBatch, Rollout, Priorities, Standing, Weights, InferenceRequest,
    InferenceReply, Evaluated, Orders, Notice,
)  # fmt: skip
"""Every class that may travel; the codec decodes no other."""
