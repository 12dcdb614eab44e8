"""Lets an actor act for some environments while others step: all at once, by groups, or whoever is ready first."""

from __future__ import annotations

import contextlib
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import EnvironmentFault
from qfleet.core.protocols import Waitable
from qfleet.core.role import State
from qfleet.core.spec import EnvSpec
from qfleet.core.types import Bools, Ints, Leaves
from qfleet.core.waiting import Waiter
from qfleet.envs.gym import Factory
from qfleet.envs.make import EnvConfig, make_env
from qfleet.envs.steptimes import StepTimes
from qfleet.envs.vector import Tick, VectorEnv
from qfleet.envs.workers import WorkersEnv

T = TypeVar("T")

_MANY_RINGS = 4096


class Part(NamedTuple):
    """What some environments did."""

    envs: Ints  # [K] ascending
    tick: Tick  # of these K


class Stepping(ABC):
    """E environments. Actions are sent for those that wait, and parts come back in which these wait again."""

    def __init__(self, vectors: Sequence[VectorEnv]) -> None:
        self.spec: EnvSpec = vectors[0].spec
        sizes = [vector.num_envs for vector in vectors]
        self.num_envs = sum(sizes)
        self.watched = all(vector.watched for vector in vectors)
        self._vectors = list(vectors)
        self._members = np.split(np.arange(self.num_envs), np.cumsum(sizes)[:-1])
        self._held: deque[Part] = deque()
        self._times = StepTimes(self.num_envs)

    @property
    def units(self) -> list[Ints]:
        """The environments, in sets that are only sent actions together."""
        return list(self._members)

    def expect(self, count: int) -> None:  # noqa: B027  (most wait for whole vectors)
        """Be told that actions will be sent for `count` environments only, until told otherwise."""

    @property
    def seconds(self) -> NDArray[np.float64]:
        """How long a step of each environment [E] takes of late; 0 before the first, and where nobody can tell."""
        return self._times.seconds

    @property
    def cut(self) -> Ints:
        """After `load_state_dict`: environments whose open episode could not be continued and was begun anew."""
        return np.concatenate([members[v.cut] for members, v in zip(self._members, self._vectors, strict=True)])

    @property
    def parts(self) -> list[Ints]:
        """The environments, in the parts in which their first actions are best sent."""
        return list(self._members)

    def reset(self, seeds: Sequence[int]) -> tuple[Leaves, Bools | None]:
        """Begin anew; returns the observations [E, ...] and the allowed actions [E, A] where there are such."""
        for members, vector in zip(self._members, self._vectors, strict=True):
            vector.reset([seeds[index] for index in members.tolist()])
        return self.current()

    def current(self) -> tuple[Leaves, Bools | None]:
        """Return the observations [E, ...] and masks [E, A] to act on next."""
        shown = [vector.current() for vector in self._vectors]
        if len(shown) == 1:
            return shown[0]
        masks = [mask for _, mask in shown if mask is not None]
        leaves = {name: np.concatenate([leaves[name] for leaves, _ in shown]) for name in self.spec.observations}
        return leaves, np.concatenate(masks) if masks else None

    @abstractmethod
    def send(self, action: Ints, envs: Ints) -> None:
        """Let waiting environments `envs` [K] take joint actions [K]; returns at once."""

    @abstractmethod
    def under_way(self) -> bool:
        """Return whether `receive` has something to wait for: not when all that were sent actions are away."""

    def ready(self) -> bool:
        """Return whether it is time to `receive`: the next part is there, or these can only wait for it there."""
        return True

    def wait(self, others: Sequence[Waitable]) -> None:  # noqa: B027  (most can only wait in `receive`)
        """Wait until they are ready, or one of the others has news."""

    @abstractmethod
    def receive(self) -> Part:
        """Wait for the next part of the environments that were sent actions; only allowed while some are under way."""

    def given_up(self) -> list[int]:
        """Return the environments that were lost and come back no more."""
        pairs = zip(self._members, self._vectors, strict=True)
        return [int(members[index]) for members, vector in pairs for index in vector.given_up()]

    def _require_one(self, tick: Tick) -> None:
        """Raise what the last environment said if all have been given up."""
        if not tick.valid.any() and len(self.given_up()) == self.num_envs:
            said = (vector.last_words for vector in self._vectors if vector.last_words is not None)
            raise next(said, EnvironmentFault("no environment is left: all had been given up when the run was saved"))

    @property
    def making(self) -> bool:
        """Whether an environment is being made anew."""
        return any(vector.making for vector in self._vectors)

    def helpers_cpu_s(self) -> float:
        """Return the processor time so far of the processes that environments have of their own."""
        return sum(vector.helpers_cpu_s() for vector in self._vectors)

    def incidents(self) -> list[str]:
        """Return what has happened to environments since the last call and a person should know."""
        return [text for vector in self._vectors for text in vector.incidents()]

    def state_dict(self) -> State:
        """Return what the future depends on; environments under way are waited for, and their parts kept."""
        self._drain()
        held = [{"envs": part.envs, "tick": dict(vars(part.tick))} for part in self._held]
        return {"vectors": [vector.state_dict() for vector in self._vectors], "held": held}

    def load_state_dict(self, state: State) -> list[Ints]:
        """Continue; returns the environments that wait for actions, in the parts in which these are best sent."""
        for vector, part in zip(self._vectors, state["vectors"], strict=True):
            vector.load_state_dict(part)
        self._held = deque(Part(np.array(kept["envs"]), Tick(**kept["tick"])) for kept in state["held"])
        under_way = np.concatenate([np.zeros(0, np.int64), *(part.envs for part in self._held)])
        waiting = [np.setdiff1d(envs, under_way) for envs in self.parts]
        return [envs for envs in waiting if len(envs)]

    def close(self) -> None:
        """Give the environments back."""
        for vector in self._vectors:
            vector.close()

    @abstractmethod
    def _drain(self) -> None:
        """Wait for every environment that is under way, and hold its part."""


class Whole(Stepping):
    """One vector that is stepped as one, when its part is asked for."""

    _action: Ints | None = None

    def send(self, action: Ints, envs: Ints) -> None:
        """Keep the actions of all environments."""
        self._action = action

    def under_way(self) -> bool:
        """Return whether there are actions to take."""
        return self._action is not None

    def receive(self) -> Part:
        """Step every environment."""
        action, self._action = self._action, None
        assert action is not None, "actions are sent before their part is received"
        (vector,), (envs,) = self._vectors, self._members
        vector.timing = self._times.due(0)
        tick = vector.step(action)
        if vector.timing and vector.step_seconds is not None:
            self._times.note(envs, vector.step_seconds)
        self._require_one(tick)
        return Part(envs, tick)

    def state_dict(self) -> State:
        """Return the state of the vector alone: nothing is ever under way."""
        return self._vectors[0].state_dict()

    def load_state_dict(self, state: State) -> list[Ints]:
        """Continue; all environments wait."""
        self._vectors[0].load_state_dict(state)
        return self.parts

    def _drain(self) -> None:
        """Nothing is ever under way."""


class Grouped(Stepping):
    """Several vectors that step at the same time, whose parts come in the order in which they were sent.

    The order does not depend on who is faster, so that neither does anything that is learned. Each has a thread: one
    that waits, where the vector steps by itself once it has begun, or else one that steps it, which pays for
    environments that leave Python while they step.
    """

    def __init__(self, vectors: Sequence[VectorEnv]) -> None:
        super().__init__(vectors)
        self._threads = ThreadPoolExecutor(len(vectors), thread_name_prefix="environments")
        self._under_way: deque[_Step] = deque()
        self._bell, self._rope = socket.socketpair()
        self._waiter = Waiter(self._bell)

    def send(self, action: Ints, envs: Ints) -> None:
        """Let one whole group step."""
        (group,) = [at for at, members in enumerate(self._members) if np.array_equal(members, envs)]
        vector, began = self._vectors[group], time.perf_counter()
        vector.timing = self._times.due(int(envs[0]))
        step = partial(vector.step, action)
        end = vector.begin(action)
        work = self._threads.submit(_timed, step if end is None else end, began)
        work.add_done_callback(self._ring)
        self._under_way.append(_Step(envs, work, None if end is None else step, vector))

    def _ring(self, work: object) -> None:
        with contextlib.suppress(BlockingIOError):  # one that is full of rings wakes too
            self._rope.send(b"!", socket.MSG_DONTWAIT)

    def ready(self) -> bool:
        """Return whether the group that was sent first has stepped."""
        return bool(self._held) or self._under_way[0].work.done()

    def wait(self, others: Sequence[Waitable]) -> None:
        """Wait until it has, or one of the others has news."""
        waitables = [waitable for other in others if (waitable := other.waitable()) is not None]
        if self._waiter.wait(waitables, None):
            self._bell.recv(_MANY_RINGS)

    def under_way(self) -> bool:
        """Return whether a group steps, or has stepped."""
        return bool(self._held or self._under_way)

    def receive(self) -> Part:
        """Wait for the group that was sent first."""
        return self._held.popleft() if self._held else self._finish()

    def close(self) -> None:
        """Let the threads end first: a vector must not be closed under one of them."""
        self._threads.shutdown(cancel_futures=True)
        self._bell.close()
        self._rope.close()
        super().close()

    def _drain(self) -> None:
        while self._under_way:
            self._held.append(self._finish())

    def _finish(self) -> Part:
        step = self._under_way.popleft()
        tick, seconds = step.work.result()
        if step.vector.timing:
            each = step.vector.step_seconds
            self._times.note(step.envs, seconds if each is None else each)
        tick = tick if step.rest is None else step.rest()
        self._require_one(tick)
        return Part(step.envs, tick)


class _Step(NamedTuple):
    """A step of a group, under way in a thread."""

    envs: Ints
    work: Future[tuple[Any, float]]  # its result, and its seconds
    rest: Callable[[], Tick] | None
    """What makes a tick of it, where the thread only waited."""
    vector: VectorEnv


def _timed(work: Callable[[], T], began: float) -> tuple[T, float]:
    """Return what a step that `began` before brings, and its seconds."""
    return work(), time.perf_counter() - began


class ReadyFirst(Stepping):
    """Environments in processes of their own: a part is whoever is ready, so that a slow one holds up nobody."""

    def __init__(self, workers: WorkersEnv, groups: int) -> None:
        super().__init__([workers])
        self._workers, self._groups = workers, groups
        self._sent_at = np.zeros(self.num_envs)
        self.expect(self.num_envs)

    @property
    def units(self) -> list[Ints]:
        """Each environment by itself."""
        return list(np.arange(self.num_envs)[:, None])

    def expect(self, count: int) -> None:
        """Wait for a smaller number of environments at a time when only `count` are acted for."""
        self._at_least = -(-count // self._groups)

    def send(self, action: Ints, envs: Ints) -> None:
        """Let some environments step."""
        self._sent_at[envs] = time.perf_counter()
        self._workers.send(action, envs)

    def under_way(self) -> bool:
        """Return whether an environment steps, or has something to tell."""
        return bool(self._held) or self._workers.under_way()

    def receive(self) -> Part:
        """Wait for a group's number of environments, whichever they are; fewer when others are lost."""
        return self._held.popleft() if self._held else self._finish(self._at_least)

    def _drain(self) -> None:
        while self._workers.under_way():
            self._held.append(self._finish(self.num_envs))

    def _finish(self, at_least: int) -> Part:
        envs, tick = self._workers.receive(at_least)
        self._times.note(envs, time.perf_counter() - self._sent_at[envs])
        return Part(envs, tick)


def make_stepping(
    config: EnvConfig, num_envs: int, groups: int = 1, factory: Factory | None = None, mends: bool = False
) -> Stepping:
    """Return environments for an actor that acts for `groups` parts of them in turn; 1 for all at once.

    `mends` is that of `make_env`.
    """
    if groups == 1:
        return Whole([make_env(config, num_envs, factory=factory, mends=mends)])
    sizes = [len(part) for part in np.array_split(np.arange(num_envs), min(groups, num_envs))]
    if getattr(config, "vectorisation", "") == "async":
        whole = make_env(config, num_envs, factory=factory)
        if isinstance(whole, WorkersEnv):
            return ReadyFirst(whole, groups)
        whole.close()  # its own autoreset: Gymnasium's vector, which is stepped as a whole
    return Grouped(_made_all(config, sizes, factory, mends))


def _made_all(config: EnvConfig, sizes: Sequence[int], factory: Any, mends: bool) -> list[VectorEnv]:
    """Return a vector of each size; those already made are closed when a later one fails."""
    made: list[VectorEnv] = []
    try:
        for size in sizes:
            made.append(make_env(config, size, factory=factory, mends=mends))
    except BaseException:
        for vector in made:
            vector.close()
        raise
    return made
