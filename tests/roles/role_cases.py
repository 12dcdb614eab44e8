"""What the tests of roles share: small settings, and handles that remember what was sent."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from qfleet.core import codec
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Batch, Version

SPEC = EnvSpec(name="toy", observations={PLAIN: LeafSpec(shape=(3,), dtype="float32")}, actions=2)


class Edge:
    """A stream, a latest value and a counter in one, without a runtime."""

    def __init__(self, messages: Any = (), capacity: int = 1000) -> None:
        self.queue, self.capacity, self.closed, self.count = deque(messages), capacity, False, 0
        self.number, self.left = 0, False

    def waitable(self) -> None:
        return None

    def ready(self) -> bool:
        return len(self.queue) < self.capacity

    def send(self, message: Any) -> None:
        assert self.ready()
        self.queue.append(message)
        self.number += 1

    publish = send

    def receive(self) -> Any:
        return self.queue.popleft() if self.queue else None

    latest = receive

    def close(self) -> None:
        self.closed = True

    def exhausted(self) -> bool:
        return self.closed and not self.queue

    def sent(self) -> int:
        return self.number

    def deserted(self) -> bool:
        return self.left

    def add(self, amount: int) -> None:
        self.count += amount

    def total(self) -> int:
        return self.count

    own = total


def random_batch(rng: np.random.Generator, size: int = 16, reward: float | None = None) -> Batch:
    """A batch for SPEC; `reward` replaces every reward (NaN, say)."""
    rewards = rng.normal(size=size).astype(np.float32) if reward is None else np.full(size, reward, np.float32)
    return Batch(
        observation={PLAIN: rng.normal(size=(size, 3)).astype(np.float32)},
        action=rng.integers(2, size=size),
        reward=rewards,
        discount=np.full(size, 0.99, np.float32),
        next_observation={PLAIN: rng.normal(size=(size, 3)).astype(np.float32)},
        weight=rng.uniform(0.5, 1, size).astype(np.float32),
        index=np.arange(size),
        generation=np.zeros(size, np.int64),
        version=Version(0, 0),
        global_size=size,
    )


class Keep:
    """A role's memory that outlives it, in the memory of the test."""

    def __init__(self) -> None:
        self.life = self.gone = 0
        self.planned, self.meeting = False, ""
        self.arrays, self.state = {}, None  # type: ignore[var-annotated]

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.arrays.setdefault(name, np.zeros(shape, dtype))

    def commit(self, state: Any) -> None:
        self.state = codec.roundtrip(state)

    def committed(self) -> Any:
        return codec.roundtrip(self.state)
