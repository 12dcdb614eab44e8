"""Keeps what the actors saw and pushes batches to the learner, at the rate that the run's limiter allows.

Receives: Experience from its actors, Priorities from the learner.
Sends: Batches, one part of each for every learner rank.
Waits for: new experience, room in the batch streams, or the limiter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qfleet.algo.schedules import Schedule
from qfleet.core import seeding
from qfleet.core.protocols import Counter, Receiver, Sender
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.spec import EnvSpec
from qfleet.core.types import Batch, Experience, Priorities, Version
from qfleet.replay import RateLimiter, Replay, ReplayConfig


@dataclass(frozen=True)
class ShardSetup:
    """Everything a shard is built from, besides its handles."""

    replay: ReplayConfig
    spec: EnvSpec
    streams: int
    n_step: int
    gamma: float
    normalise_rewards: bool
    batch_size: int
    """Global batch: the sum over learner ranks."""
    train_period: float
    learning_starts: int
    beta: Schedule
    """Exponent of the importance weights as a function of the run's environment steps."""
    seed: int
    index: int
    directory: Path | None
    """Where the memory-mapped tier puts its files."""


@dataclass(frozen=True)
class ShardHandles:
    """What a shard sees of the run."""

    experience: tuple[Receiver[Experience], ...]
    priorities: tuple[Receiver[Priorities], ...]
    """One for each learner rank; none for uniform sampling."""
    batches: tuple[Sender[Batch], ...]
    """One for each learner rank."""
    env_steps: Counter
    inserts: Counter
    samples: Counter
    """Batches drawn by all shards."""


class ReplayShard(Role):
    """One shard of the run's replay."""

    kind = "replay"

    def __init__(self, setup: ShardSetup, handles: ShardHandles) -> None:
        self._setup, self._handles = setup, handles
        self._replay = Replay(
            setup.replay,
            setup.spec,
            streams=setup.streams,
            n_step=setup.n_step,
            gamma=setup.gamma,
            rng=seeding.numpy_stream(setup.seed, self.kind, setup.index, "sampling"),
            directory=setup.directory,
            normalise_rewards=setup.normalise_rewards,
        )
        self._limiter = RateLimiter(
            train_period=setup.train_period,
            learning_starts=setup.learning_starts,
            inserts=handles.inserts,
            updates=handles.samples,
        )
        self._version = Version()
        self._turn = 0

    def step(self) -> Status:
        """Take in priorities and experience, then draw at most one batch."""
        took = self._take_priorities() + self._take_experience()
        room = all(sender.ready() for sender in self._handles.batches)
        due = self._limiter.may_sample() and len(self._replay) > 0
        if due and room:
            self._send_batch()
            return WORKED
        if took:
            return WORKED
        if not due and all(stream.exhausted() for stream in self._handles.experience):
            for sender in self._handles.batches:
                sender.close()
            return DONE
        if due:
            return Idle("the learner has not taken its batch", wake_on=self._handles.batches)
        return Idle("no new experience", wake_on=self._handles.experience)

    def _take_priorities(self) -> int:
        taken = 0
        for stream in self._handles.priorities:
            while (message := stream.receive()) is not None:
                self._replay.update_priorities(message)
                taken += 1
        return taken

    def _take_experience(self) -> int:
        taken, streams = 0, self._handles.experience
        for number in range(self._turn, self._turn + len(streams)):
            # While no window is complete there is nothing to sample, however many updates are owed.
            if not self._limiter.may_insert() and len(self._replay):
                break
            if (message := streams[number % len(streams)].receive()) is not None:
                self._handles.inserts.add(self._replay.append(message))
                self._version = max(self._version, message.version)
                self._turn = (number + 1) % len(streams)  # the limiter must not favour the first actors
                taken += 1
        return taken

    def _send_batch(self) -> None:
        beta = self._setup.beta.at(self._handles.env_steps.total())
        batch = self._replay.sample(self._setup.batch_size, beta)
        batch = dataclasses.replace(batch, version=self._version, global_size=self._setup.batch_size)
        self._handles.samples.add(1)
        ranks = len(self._handles.batches)
        for rank, sender in enumerate(self._handles.batches):
            sender.send(batch if ranks == 1 else _every(batch, rank, ranks))

    def metrics(self) -> Mapping[str, float]:
        """Return how full the shard is and how often its items are used."""
        inserts, samples = self._handles.inserts.total(), self._handles.samples.total()
        ratio = samples * self._setup.batch_size / inserts if inserts else 0.0
        return {**self._replay.metrics(), "samples_per_insert": ratio}

    def state_dict(self) -> State:
        """Return every stored row with its priority, the random stream, and how the limiter stands."""
        return {
            "replay": self._replay.state_dict(),
            "limiter": self._limiter.state_dict(),
            "version": self._version,
            "turn": self._turn,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue; what the limiter was owed beyond its tolerance is forgiven."""
        self._replay.load_state_dict(state["replay"])
        self._limiter.load_state_dict(state["limiter"])
        self._limiter.forgive()
        self._version, self._turn = state["version"], state["turn"]


def _every(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return the rows of one learner rank: every `ranks`-th stratum of the one global draw."""

    def part(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.ascontiguousarray(value[rank::ranks])
        if isinstance(value, dict):
            return {name: part(leaf) for name, leaf in value.items()}
        return value

    return dataclasses.replace(batch, **{f.name: part(getattr(batch, f.name)) for f in dataclasses.fields(batch)})
