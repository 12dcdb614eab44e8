"""How long environments take: told of each one where that is possible, and by more than one step."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from qfleet.envs import GymConfig
from qfleet.envs.stepping import Grouped, ReadyFirst, Whole, make_stepping
from qfleet.envs.steptimes import APART_S, StepTimes


class Clock:
    """In place of `time.perf_counter`."""

    now = 100.0

    def __call__(self) -> float:
        return Clock.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class Lasting(gym.Env[Any, Any]):
    """Its steps take as long by the false clock as its seed says, and every third reset a hundred times that."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seconds = seed / 100 if seed is not None else self.seconds
        self.steps = 0
        Clock.now += 100 * self.seconds
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Clock.now += self.seconds
        self.steps += 1
        return np.zeros(1, np.float32), 0.0, self.steps == 5, False, {}


@pytest.mark.parametrize(("groups", "kind"), [(1, Whole), (2, Grouped)])
def test_each_environment_of_a_vector_that_steps_them_in_turn_is_timed_without_its_resets(groups, kind):
    config = GymConfig(id="lasting")
    with closing(make_stepping(config, 4, groups, factory=Lasting)) as env:
        assert isinstance(env, kind)
        env.reset([1, 1, 10, 1])
        assert env.seconds.tolist() == [0, 0, 0, 0], "before the first step"
        for _ in range(20):
            for part in env.parts:
                env.send(np.zeros(len(part), np.int64), part)
                env.receive()
        assert env.seconds == pytest.approx([0.01, 0.01, 0.1, 0.01])


@pytest.mark.parametrize(("groups", "kind"), [(1, Whole), (2, ReadyFirst)])
def test_environments_in_processes_of_their_own_are_timed_too(groups, kind, clock, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", time.monotonic)
    config = GymConfig(id="CartPole-v1", vectorisation="async")
    with closing(make_stepping(config, 3, groups)) as env:
        assert isinstance(env, kind)
        env.reset([1, 2, 3])
        waiting = list(env.parts)
        for _ in range(100_000):  # who is not ready yet is not waited for
            if (env.seconds > 0).all():
                break
            for part in waiting:
                env.send(np.zeros(len(part), np.int64), part)
            waiting = [env.receive().envs]
        assert (env.seconds > 0).all()


def test_long_steps_among_others_say_nothing_and_one_that_stays_long_is_known_soon(clock):
    """On a busy machine the first environment of each tick passed for slow: it met whoever wanted the core."""
    times, both = StepTimes(2), np.arange(2)
    for step in range(30):
        times.note(both, np.array([1.0, 1.0 if step % 5 == 2 else 50.0]))
        Clock.now += APART_S
        assert step < 2 or times.seconds.tolist() == [1, 1]
    for _ in range(5):
        times.note(both, np.array([1.0, 50.0]))
        Clock.now += APART_S
    assert times.seconds.tolist() == [1, 50]


def test_samples_are_not_all_of_the_same_moment(clock):
    times, both = StepTimes(2), np.arange(2)
    times.note(both, 1.0)
    for _ in range(100):
        times.note(both, 9.0)
        Clock.now += APART_S / 1000
    assert times.seconds.tolist() == [1, 1]
    assert not times.due(0)
    Clock.now += APART_S
    assert times.due(0)
