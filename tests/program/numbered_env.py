"""An environment whose every observation is unlike any other, which writes down each step before it is taken."""

from __future__ import annotations

import itertools
import os
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import psutil

_STEP = struct.Struct("<4q")
_SLOW_S = 0.02
_PLAYERS = ("actor-", "evaluator-", "test-")


class Place(NamedTuple):
    """Where an episode is: which one, and how many steps into it."""

    seed: int
    step: int


class Step(NamedTuple):
    """One step as the environment wrote it down."""

    env: int
    """Which environment of its process."""
    place: Place
    action: int


def length(seed: int) -> int:
    """Steps of an episode."""
    return 3 + seed % 17


def terminates(seed: int) -> bool:
    """Whether an episode ends by rule, not by limit."""
    return seed % 3 > 0


def reward(place: Place, action: int) -> float:
    """What a step brings."""
    return float((place.seed + 7 * place.step + 3 * action) % 11)


def shown(place: Place) -> Any:
    """Return the observation that shows a place."""
    return np.array([*place.seed.to_bytes(4, "big"), place.step], np.uint8)


def place_of(observation: Any) -> Place:
    """Return the place that an observation shows."""
    *seed, step = (int(value) for value in observation)
    return Place(int.from_bytes(bytes(seed), "big"), step)


def role_here() -> str:
    """Return the role that this process is, or is an environment of: roles name their process."""
    own = psutil.Process()
    names = [process.name() for process in (own, *own.parents()[:2])]  # the parent of environments is between
    return next((name for name in names if name.startswith(_PLAYERS)), names[0])


class NumberedEnv(gym.Env):  # type: ignore[type-arg]
    """Goes on step by step whatever is done."""

    observation_space = gym.spaces.Box(0, 255, (5,), np.uint8)
    action_space = gym.spaces.Discrete(3)
    _made = 0
    _taken = itertools.count(1)
    """The number of the next step of all environments of this process."""

    def __init__(
        self, journal: str, hang_at: int = 0, slow: str = "", raise_at: int = 0, raise_in: str = "actor-"
    ) -> None:
        """Write steps into a file of the directory `journal` that is named after the role and the process.

        With `hang_at` the first environment of each actor hangs in that step, counted from 1, in its first life. While
        the file `slow` exists, steps take so long that a run does not come to its end on any machine. Every
        `raise_at`-th step, counted over all environments of a process, raises an error in those whose name begins with
        `raise_in`.
        """
        self._slow = slow
        self._seed, self._step, self._number = 0, 0, NumberedEnv._made
        NumberedEnv._made += 1
        role = role_here()
        spared = self._number or not role.startswith("actor-") or any(Path(journal).glob(f"{role}.*"))
        self._hangs_in = 0 if spared else hang_at
        self._raise_at = raise_at if role.startswith(raise_in) else 0
        path = Path(journal) / f"{role}.{os.getpid()}"
        self._journal = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._seed, self._step = self._seed + 1 if seed is None else seed, 0
        return shown(Place(self._seed, self._step)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        place = Place(self._seed, self._step)
        os.write(self._journal, _STEP.pack(self._number, *place, int(action)))
        if self._raise_at and next(NumberedEnv._taken) % self._raise_at == 0:
            raise ZeroDivisionError("the robot fell over")
        self._hangs_in -= 1
        while self._hangs_in == 0:
            time.sleep(3600)
        if self._slow and os.path.exists(self._slow):
            time.sleep(_SLOW_S)
        self._step += 1
        over = self._step >= length(self._seed)
        ends = terminates(self._seed)
        after = shown(Place(self._seed, self._step))
        return after, reward(place, int(action)), over and ends, over and not ends, {}

    def close(self) -> None:
        os.close(self._journal)


def journals(directory: Path) -> list[list[Step]]:
    """Return what each life of each actor wrote down, in order."""
    lives = []
    for path in sorted(directory.glob("actor-*")):
        content = path.read_bytes()
        whole = content[: len(content) // _STEP.size * _STEP.size]
        lives.append([Step(env, Place(seed, step), action) for env, seed, step, action in _STEP.iter_unpack(whole)])
    return lives


gym.register("Numbered-v0", entry_point=NumberedEnv)
