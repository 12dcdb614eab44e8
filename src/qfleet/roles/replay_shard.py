"""Keeps what the actors saw and pushes batches to the learner, at the rate that the run's limiter allows.

Receives: Experience from its actors, Priorities from the learner, Standings (latest values) from other shards.
Sends: Batches, one part of each for every learner rank; its Standing (latest value) where it is not the only shard.
Waits for: new experience, room in the batch streams, or the limiter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.schedules import Schedule
from qfleet.algo.sequences import first_priorities
from qfleet.core import seeding
from qfleet.core.failpoints import failpoint
from qfleet.core.protocols import Counter, Keep, Publisher, Receiver, Sender, Subscriber
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.core.types import Batch, Experience, Priorities, SequenceBatch, Standing, Version
from qfleet.replay import RateLimiter, Replay, ReplayConfig, SequenceWindow
from qfleet.replay.storage import StorageConfig, remove_files
from qfleet.replay.store import row_bytes
from qfleet.roles.dealing import Dealing


@dataclass(frozen=True)
class ShardSetup:
    """Everything a shard is built from, besides its handles."""

    replay: ReplayConfig
    spec: EnvSpec
    streams: int
    """Environments of the actors that this shard serves."""
    n_step: int
    gamma: float
    normalise_rewards: bool
    batch_size: int
    """Global batch of an update: the sum over learner ranks."""
    train_period: float
    learning_starts: int
    beta: Schedule
    """Exponent of the importance weights as a function of the run's environment steps."""
    seed: int
    index: int
    directory: Path | None
    """Where the memory-mapped tier puts its files."""
    updates_per_draw: int = 1
    """Updates for which batches are drawn at once, and sent as one message."""
    split: int = 1
    """Learner ranks that share a network, and so get the same part of a batch."""
    sequence: SequenceWindow | None = None
    """How episodes are cut into sequences, for agents with memory; None for transitions."""
    judged_by: ReplayAgent | None = None
    """The agent whose values give new sequences their priorities; None where they get the maximum."""
    extras: Mapping[str, LeafSpec] = field(default_factory=dict)
    """What actors send with each row besides."""
    mirrored: bool = False
    """Whether the learner has a copy of the rows, so that batches need not have the observations."""
    dealt: bool = False
    """Whether each batch goes as a whole to one rank that has room for it, in turn, and not in parts to all."""
    part: Fraction = Fraction(1)
    """How much of the run's capacity this shard has."""
    look_again_s: float | None = None
    """Seconds after which an idle shard looks again what is due: other shards make updates due, and draw them, without
    waking this one. None where it is the only one, or where roles take turns."""

    def row_bytes(self, storage: StorageConfig) -> float:
        """Return about how many bytes of memory one row takes where observations are stored so."""
        return row_bytes(storage, self.spec, self.sequence is not None, self.judged_by is not None, self.extras)


@dataclass(frozen=True)
class ShardHandles:
    """What a shard sees of the run."""

    experience: tuple[Receiver[Experience], ...]
    priorities: tuple[Receiver[Priorities], ...]
    """One for each replica of the network; none for uniform sampling."""
    batches: tuple[Sender[Batch | SequenceBatch], ...]
    """One for each learner rank."""
    env_steps: Counter
    inserts: Counter
    samples: Counter
    """Updates that all shards have drawn for."""
    standing: Publisher[Standing] | None = None
    """Where it tells how much it has to draw from; None for the only shard."""
    others: tuple[Subscriber[Standing] | None, ...] = ()
    """Where each shard tells that, None in its own place; empty for the only shard."""
    keep: Keep | None = None
    """Where rows and ledger outlive the shard; None where nothing does."""


class ReplayShard(Role):
    """One shard of the run's replay."""

    kind = "replay"

    def __init__(self, setup: ShardSetup, handles: ShardHandles) -> None:
        self._setup, self._handles = setup, handles
        keep, life = handles.keep, handles.keep.life if handles.keep else 0
        if life == 0 and setup.directory is not None:
            remove_files(setup.directory)  # of a run that was killed
        self._replay = Replay(
            setup.replay,
            setup.spec,
            streams=setup.streams,
            n_step=setup.n_step,
            gamma=setup.gamma,
            part=setup.part,
            rng=seeding.numpy_stream(setup.seed, self.kind, setup.index, seeding.of_life("sampling", life)),
            sequence=setup.sequence,
            judge=None if setup.judged_by is None else partial(first_priorities, setup.judged_by),
            extras=setup.extras,
            directory=setup.directory,
            normalise_rewards=setup.normalise_rewards,
            allocate=keep.array if keep else None,
            life=life,
        )
        self._limiter = RateLimiter(
            train_period=setup.train_period,
            learning_starts=setup.learning_starts,
            inserts=handles.inserts,
            updates=handles.samples,
            together=setup.updates_per_draw,
        )
        self._dealing = Dealing(
            handles.batches,
            handles.samples,
            size=setup.batch_size * setup.updates_per_draw,
            shards=max(len(handles.others), 1),
            split=setup.split,
            keep=keep,
        )
        self._version = Version()
        self._turn = self._dealt = 0
        self._told = Standing(0.0, 0.0)
        self._known = [Standing(0.0, 1.0) for _ in handles.others]
        self._highest = [0.0 for _ in handles.priorities]
        """The last maximum over all shards that each replica knew, where there are several."""
        if keep is not None and life > 0:
            self._recover(keep)
        if setup.mirrored:
            self._replay.store.mirror()
        if life > 0:
            self._finish_draw()

    def _recover(self, keep: Keep) -> None:
        """Be the shard of the last commit; what came after it is still in the streams."""
        ledger = keep.committed() or self._ledger()  # without a commit: that of an empty replay
        self._replay.recover(ledger["replay"])
        self._limiter.forgiven = ledger["forgiven"]
        self._version, self._turn = ledger["version"], ledger["turn"]
        inserts = self._handles.inserts
        inserts.add(self._replay.counts["inserted"] - inserts.own())

    def _finish_draw(self) -> None:
        """Send what a former life drew and died of sending: some learners may have got their parts of it."""
        if (unsent := self._dealing.unsent()) is None:
            return
        batch: Batch | SequenceBatch
        if self._setup.sequence:
            batch = self._replay.sequences(unsent.index, unsent.weight)
        else:
            batch = self._replay.transitions(unsent.index, unsent.weight)
            batch = dataclasses.replace(batch, updates=self._setup.updates_per_draw)
        told = (unsent.beta, unsent.standings, unsent.draw, unsent.parts)
        self._dealing.send_parts(self._stamped(batch, *told), unsent.ranks)

    def _ledger(self) -> State:
        return {
            "replay": self._replay.ledger(),
            "forgiven": self._limiter.forgiven,
            "version": self._version,
            "turn": self._turn,
        }

    def _commit(self) -> None:
        """Make everything up to here outlive this process; messages leave their streams only after that."""
        if self._handles.keep is not None:
            failpoint("replay.before_commit")
            self._handles.keep.commit(self._ledger())
            failpoint("replay.after_commit")

    def step(self) -> Status:
        """Take in priorities and experience, then draw at most one batch."""
        took = self._take_priorities() + self._take_experience()
        if took:
            self._commit()
            self._tell_standing()
        room = self._has_room()
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
        deadline = self._setup.look_again_s
        if due:
            return Idle("the learner has not taken its batch", wake_on=self._handles.batches, deadline=deadline)
        return Idle("no new experience", wake_on=self._handles.experience, deadline=deadline)

    def _has_room(self) -> bool:
        """Return whether all ranks, or one to whom a whole batch is dealt, can take more."""
        ready = [self._handles.batches[rank].ready() for rank in self._dealing.ranks]
        return any(ready) if self._setup.dealt else all(ready)

    def _take_priorities(self) -> int:
        taken = 0
        for replica, stream in enumerate(self._handles.priorities):
            while (message := stream.receive()) is not None:
                if message.highest:
                    message = dataclasses.replace(message, highest=self._highest_of_all(replica, message.highest))
                self._replay.update_priorities(message)
                taken += 1
        return taken

    def _highest_of_all(self, replica: int, highest: float) -> float:
        """Return the highest priority that any replica knows, each of which sees its own parts of draws only."""
        self._highest[replica] = highest
        return max(self._highest[rank // self._setup.split] for rank in self._dealing.ranks)

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

    def _tell_standing(self) -> None:
        """Let the other shards know when the mass has changed by a hundredth, or the least value at all."""
        if self._handles.standing is None:
            return
        now, told = self._replay.standing, self._told
        if now.least != told.least or abs(now.mass - told.mass) > 0.01 * told.mass:
            self._handles.standing.publish(now)
            self._told = now

    def _send_batch(self) -> None:
        beta = self._setup.beta.at(self._handles.env_steps.total())
        size, updates = self._setup.batch_size, self._setup.updates_per_draw
        batch: Batch | SequenceBatch
        if self._setup.sequence:
            batch = self._replay.sample_sequences(size, beta)
        else:
            batch = self._replay.sample(size, beta, updates)
        ranks = [self._next_rank()] if self._setup.dealt else self._dealing.ranks
        told = (beta, self._standings(), self._handles.samples.own() + updates, self._dealing.parts(ranks))
        self._dealing.send(self._stamped(batch, *told), ranks)

    def _stamped(
        self, batch: Batch | SequenceBatch, beta: float, standings: tuple[Standing, ...], draw: int, parts: int
    ) -> Batch | SequenceBatch:
        """Return a draw with all that the learners have to know of it."""
        return dataclasses.replace(
            batch,
            version=self._version,
            draw=draw,
            global_size=self._setup.batch_size * self._setup.updates_per_draw,
            shard=self._setup.index,
            least=self._replay.sampler.least,
            beta=beta,
            standings=standings,
            parts=parts,
        )

    def _standings(self) -> tuple[Standing, ...]:
        """Return how much every shard has to draw from, this one now and the others when they last said."""
        for number, other in enumerate(self._handles.others):
            told = self._replay.standing if other is None else other.latest()
            self._known[number] = told or self._known[number]
        return tuple(self._known)

    def _next_rank(self) -> int:
        """Return the next rank that has room for a whole batch."""
        ranks = len(self._handles.batches)
        turns = [(self._dealt + turn) % ranks for turn in range(ranks)]
        rank = next(turn for turn in turns if self._handles.batches[turn].ready())
        self._dealt = (rank + 1) % ranks
        return rank

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
            "told": self._told,
            "known": list(self._known),
            "dealt": self._dealt,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue; what the limiter was owed beyond its tolerance is forgiven."""
        self._replay.load_state_dict(state["replay"])
        self._limiter.load_state_dict(state["limiter"])
        if self._handles.standing is None:  # counters of several shards come back one after the other
            self._limiter.forgive()
        self._version, self._turn = state["version"], state["turn"]
        self._told, self._dealt = state.get("told", self._told), state.get("dealt", 0)
        self._known = list(state.get("known", self._known))
        self._dealing.forget()
        if self._setup.mirrored:
            self._replay.store.mirror()
        self._commit()

    def close(self) -> None:
        """Delete the files of the mapped tier."""
        if self._setup.directory is not None:
            remove_files(self._setup.directory)
