"""Environments with a known script, for the tests of the adapters."""

from __future__ import annotations

import copy
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counting(gymnasium.Env[Any, Any]):
    """Observes (episode's seed-drawn tag, step, last action); lengths and kinds of end are drawn from the seed.

    It writes every observation into one buffer, as many real environments do. Rewards are 10 * step + action.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, longest: int = 6, masked: bool = False, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (3,), np.float64)
        self.action_space = spaces.Discrete(3, start=5)
        self.render_mode = render_mode
        self._longest, self._masked = longest, masked
        self._buffer = np.zeros(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._tag = int(self.np_random.integers(1, 1000))
        self._length = int(self.np_random.integers(1, self._longest + 1))
        self._by_limit = bool(self.np_random.integers(2))
        self._buffer[:] = self._tag, 0, -1
        return self._buffer, self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        step = int(self._buffer[1])
        assert step < self._length, "stepped beyond the end of an episode"
        self._buffer[1:] = step + 1, action
        ended = step + 1 == self._length
        reward = 10.0 * step + float(action) + self.np_random.random()
        return self._buffer, reward, ended and not self._by_limit, ended and self._by_limit, self._info()

    def render(self) -> Any:
        return np.full((2, 2, 3), int(self._buffer[1]), np.uint8)

    def _info(self) -> dict[str, Any]:
        if not self._masked:
            return {}
        allowed = np.ones(3, np.int8)
        allowed[int(self._buffer[1]) % 3] = 0
        return {"action_mask": allowed}


class Sleepy(Counting):
    """Takes its time in an episode whose seed is 7, and in those that follow it."""

    def __init__(self) -> None:
        super().__init__(longest=100_000)
        self._slow = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._slow = seed == 7 or (seed is None and self._slow)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._slow:
            time.sleep(0.5)
        return super().step(action)


class Speechless(RuntimeError):
    """Cannot be told."""

    def __str__(self) -> str:
        raise TypeError("no words")


Speechless.__name__ = "RuntimeError"


class Faulty(gymnasium.Env[Any, Any]):
    """Does one thing wrong at its third step."""

    def __init__(self, wrong: str) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._wrong, self._steps, self._resets = wrong, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        self._resets += 1
        if self._wrong == "reset exception" and self._resets > 1:
            raise KeyError("broken reset")
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {"action_mask": np.ones(2, bool)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        good, mask = np.zeros(2, np.float32), np.ones(2, bool)
        if self._steps < 3:
            return good, 0.0, False, False, {"action_mask": mask}
        errors = {
            "exception": ZeroDivisionError("broken step"),
            "sys.exit": SystemExit(0),
            "speechless": Speechless("broken words"),
            "talkative": ValueError("x" * 50_000),
        }
        if self._wrong in errors:
            raise errors[self._wrong]
        observation = {
            "nan observation": np.array([0, np.nan], np.float32),
            "inf observation": np.array([0, np.inf], np.float32),
            "wrong shape": np.zeros(3, np.float32),
            "broadcastable shape": np.zeros(1, np.float32),
            "wrong dtype": np.array(["a", "b"]),
            "complex dtype": np.zeros(2, np.complex64),
        }.get(self._wrong, good)
        reward = {"nan reward": np.nan, "inf reward": -np.inf, "huge reward": 1e308}.get(self._wrong, 0.0)
        info = {"action_mask": mask if self._wrong != "empty mask" else np.zeros(2, bool)}
        return observation, reward, False, False, {} if self._wrong == "no mask" else info


class Spaced(gymnasium.Env[Any, Any]):
    """Samples its observation space; any spaces."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any] | None = None) -> None:
        self.observation_space = copy.deepcopy(observation)  # each samples from a generator of its own
        self.action_space = action or spaces.Discrete(2)
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self._sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.actions.append(action)
        return self._sample(), 1.0, False, len(self.actions) % 7 == 0, {}

    def _sample(self) -> Any:
        self.last = self.observation_space.sample()
        if isinstance(self.observation_space, spaces.Dict) and "action_mask" in self.observation_space.spaces:
            self.last["action_mask"][0] = 1
        return self.last
