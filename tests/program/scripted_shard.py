"""A shard whose draws depend on their numbers alone, so that runs with other numbers of learners get the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qfleet.core.protocols import Counter, Keep, Receiver, Sender
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Batch, Priorities, Version
from qfleet.roles.dealing import Dealing

SPEC = EnvSpec(name="scripted", observations={PLAIN: LeafSpec(shape=(3,), dtype="float32")}, actions=2)
PACE_S = 0.003
"""Seconds between two draws at least: a script must not be over before anything can be changed."""


@dataclass(frozen=True)
class Script:
    draws: int
    size: int
    """Items of each."""


@dataclass(frozen=True)
class ScriptHandles:
    batches: tuple[Sender[Batch], ...]
    priorities: tuple[Receiver[Priorities], ...]
    samples: Counter
    keep: Keep | None = None


class ScriptedShard(Role):
    """Deals out its draws as a replay shard does, and notes for which items priorities come back."""

    kind = "replay"

    def __init__(self, script: Script, handles: ScriptHandles) -> None:
        self._script, self._handles = script, handles
        self._dealing = Dealing(handles.batches, handles.samples, script.size, shards=1, split=1, keep=handles.keep)
        self._returned = np.zeros(script.draws * script.size, np.int64)

    def step(self) -> Status:
        taken = 0
        for stream in self._handles.priorities:
            while (message := stream.receive()) is not None:
                self._returned[message.index] += 1
                taken += 1
        draw = self._handles.samples.own()
        ranks = self._dealing.ranks
        if draw < self._script.draws and all(self._handles.batches[rank].ready() for rank in ranks):
            self._dealing.send(_batch(draw, self._script.size, len(ranks)), ranks)
            return Idle("its pace", wake_on=self._handles.priorities, deadline=PACE_S)
        if draw == self._script.draws:
            for sender in self._handles.batches:
                sender.close()
            if self._returned.all():
                return DONE
        return WORKED if taken else Idle("its learners", wake_on=self._handles.priorities, deadline=0.05)

    def state_dict(self) -> State:
        return {"returned": self._returned}

    def load_state_dict(self, state: State) -> None:
        self._returned[:] = state["returned"]


def _batch(draw: int, size: int, parts: int) -> Batch:
    rng = np.random.default_rng(draw)
    return Batch(
        observation={PLAIN: rng.normal(size=(size, 3)).astype(np.float32)},
        action=rng.integers(2, size=size),
        reward=rng.normal(size=size).astype(np.float32),
        discount=np.full(size, 0.99, np.float32),
        next_observation={PLAIN: rng.normal(size=(size, 3)).astype(np.float32)},
        weight=rng.uniform(0.5, 1, size).astype(np.float32),
        index=draw * size + np.arange(size),
        generation=np.zeros(size, np.int64),
        version=Version(0, 0),
        global_size=size,
        draw=draw + 1,
        parts=parts,
    )
