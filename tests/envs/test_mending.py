"""An exception of one environment among others in a process costs its episode, and nothing of the others."""

from __future__ import annotations

import itertools
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from env_cases import Faulty
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from qfleet.core.errors import EnvironmentFault
from qfleet.envs import GymConfig, make_env
from qfleet.envs.mending import LOSSES
from qfleet.envs.stepping import make_stepping

CONFIG = GymConfig(id="mine")


class Raising(gymnasium.Env[Any, Any]):
    """Counts its steps; ends after `length` of them, and raises in steps and resets as told by `plan`."""

    observation_space, action_space = spaces.Box(0, 1e6, (2,), np.float32), spaces.Discrete(2)

    def __init__(self, length: int, plan: list[bool]) -> None:
        self._length, self._plan, self._number = length, plan, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._episode = 0, self.np_random.integers(1, 1000)
        if self._number > 1 and self._raises():  # one that is made can be looked at, and begun
            raise KeyError("broken reset")
        self._number += 1
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._raises():
            raise ZeroDivisionError("broken step")
        self._step += 1
        return self._shown(), 1.0, self._step == self._length, False, {}

    def _raises(self) -> bool:
        return bool(self._plan) and self._plan.pop()

    def _shown(self) -> Any:
        return np.array([self._episode, self._step], np.float32)


def made(envs: int, wrong: str, which: int | None = None) -> Any:
    numbers = iter(range(10**6))

    def factory() -> Faulty:
        number = next(numbers)
        return Faulty(wrong if which is None or number == which or number >= envs else "nothing")

    env = make_env(CONFIG, envs, factory=factory, mends=True)
    env.reset(list(range(envs)))
    return env


def play(env: Any, steps: int) -> None:
    for _ in range(steps):
        env.step(np.zeros(env.num_envs, np.int64))


def test_an_exception_cuts_one_episode_and_is_told():
    env = made(3, "exception", which=1)
    zeros = np.zeros(3, np.int64)
    env.step(zeros)
    env.step(zeros)
    tick = env.step(zeros)
    assert tick.cut.tolist() == [1]
    assert tick.valid.tolist() == [True, False, True]
    assert not tick.terminated.any()
    assert len(tick.scored) == 0, "an episode that breaks off has no score"
    (told,) = env.incidents()
    assert told.startswith("mine, environment 1: step() raised ZeroDivisionError: broken step")
    assert told.endswith("(episode 0, step 2, both counted from 0)."
                         " The environment breaks Gymnasium's contract; gymnasium.utils.env_checker.check_env may show"
                         " where. Its episode is cut, and it begins anew.")  # fmt: skip
    after = env.step(zeros)
    assert after.valid.all()
    assert len(after.cut) == 0


def test_who_is_lost_again_and_again_is_given_up_and_comes_back_when_all_are_reset():
    env = made(2, "exception", which=0)
    zeros = np.zeros(2, np.int64)
    for _ in range(3 * LOSSES):
        tick = env.step(zeros)
    assert env.given_up() == [0]
    assert env.incidents()[-1].endswith("The run goes on without it.")
    for _ in range(5):
        tick = env.step(zeros)
        assert tick.valid.tolist() == [False, True]
        assert len(tick.cut) == 0
    env.reset([0, 1])
    assert env.given_up() == []
    assert env.step(zeros).valid.all()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_with_none_left_the_last_ones_fault_is_raised_and_not_before(groups: int) -> None:
    """With groups of one environment the first that was given up ended the run."""

    def stepping(factory: Any) -> Any:
        env = make_stepping(CONFIG, 4, groups, factory, mends=True)
        env.reset(list(range(4)))
        return env

    numbers = itertools.count()
    with closing(stepping(lambda: Faulty("nothing" if next(numbers) == 3 else "exception"))) as env:
        step_all(env, 4 * LOSSES)
        assert env.given_up() == [0, 1, 2]
    with closing(stepping(partial(Faulty, "exception"))) as env:
        with pytest.raises(EnvironmentFault, match="broken step") as caught:
            step_all(env, 4 * LOSSES)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert len(env.incidents()) == 4 * LOSSES


def test_a_run_that_was_saved_when_the_last_one_had_just_been_given_up_says_so():
    env = made(1, "exception")
    while not env.given_up():
        play(env, 1)
    with closing(make_stepping(CONFIG, 1, 1, partial(Faulty, "exception"), mends=True)) as other:
        other._vectors[0].load_state_dict(env.state_dict())
        with pytest.raises(EnvironmentFault, match="all had been given up when the run was saved"):
            step_all(other, 1)


def step_all(env: Any, ticks: int) -> None:
    for _ in range(ticks):
        for part in env.parts:
            env.send(np.zeros(len(part), np.int64), part)
            env.receive()


def test_one_that_was_given_up_stays_so_in_a_resumed_run_and_costs_no_memory():
    """Its log grew with every tick, and to replay it ended each resume."""
    env = made(2, "exception", which=0)
    play(env, 3 * LOSSES)
    lengths = env.state_dict()["backend"]["lengths"].tolist()
    play(env, 100)
    assert env.state_dict()["backend"]["lengths"].tolist()[0] == lengths[0] == 0
    other = made(2, "exception", which=0)
    other.load_state_dict(env.state_dict())
    assert (other.given_up(), len(other.cut)) == ([0], 0)
    for _ in range(5):
        ours, theirs = env.step(np.zeros(2, np.int64)), other.step(np.zeros(2, np.int64))
        assert ours.valid.tolist() == theirs.valid.tolist() == [False, True]


def test_one_that_raises_while_it_is_brought_back_costs_its_open_episode():
    env = make_env(CONFIG, 2, factory=partial(Raising, 9, []), mends=True)
    env.reset([0, 1])
    play(env, 4)
    whole, broken = (make_env(CONFIG, 2, factory=partial(Raising, 9, plan), mends=True) for plan in ([], [True]))
    for other, cut, grade in ((whole, 0, "exact"), (broken, 1, "episode")):
        other.load_state_dict(env.state_dict())
        assert (len(other.cut), other.resume_grade) == (cut, grade)


def test_while_one_is_made_anew_the_vector_says_so():
    """It was taken for a step that hangs, and its own words were lost."""
    seen: list[bool] = []

    def factory() -> Any:
        seen.append(bool(made_by and made_by[0].making))
        return Faulty("exception")

    made_by: list[Any] = []
    made_by.append(make_env(CONFIG, 1, factory=factory, mends=True))
    made_by[0].reset([0])
    play(made_by[0], 3)
    assert seen == [False, True]
    assert not made_by[0].making


def test_one_that_cannot_be_made_anew_raises_its_own_fault():
    makes = iter([False, False, True])

    def factory() -> Faulty:
        if next(makes):
            raise OSError("no more licences")
        return Faulty("exception")

    env = make_env(CONFIG, 2, factory=factory, mends=True)
    env.reset([0, 1])
    with pytest.raises(EnvironmentFault, match="broken step"):
        play(env, 3)


def test_a_run_that_was_saved_after_a_loss_goes_on_to_the_byte():
    def vector(plan: list[bool]) -> Any:
        return make_env(CONFIG, 2, factory=partial(Raising, 7, plan), mends=True)

    env = vector([False] * 6 + [True] + [False] * 5)
    env.reset([4, 5])
    zeros = np.zeros(2, np.int64)
    for _ in range(9):
        env.step(zeros)
    assert env.incidents()
    other = vector([])
    other.load_state_dict(env.state_dict())
    assert len(other.cut) == 0
    for _ in range(20):
        ours, theirs = env.step(zeros), other.step(zeros)
        assert all(np.array_equal(leaf, theirs.observation[name]) for name, leaf in ours.observation.items())


@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(st.sampled_from([False] * 6 + [True]), max_size=80),
    st.integers(0, 9),
)
def test_what_is_valid_is_what_happened_and_nothing_is_invented(
    envs: int, length: int, plan: list[bool], seed: int
) -> None:
    env = make_env(CONFIG, envs, factory=partial(Raising, length, plan), mends=True)
    env.reset([seed * 10 + index for index in range(envs)])
    (seen,) = env.current()[0].values()
    try:
        for _ in range(60):
            tick = env.step(np.zeros(envs, np.int64))
            (after,) = tick.observation.values()
            (final,) = tick.final_observation.values()
            ends = dict(zip(tick.finished.tolist(), final, strict=True))
            for index in range(envs):
                led = ends.get(index, after[index])
                if tick.valid[index]:
                    assert led.tolist() == [seen[index, 0], seen[index, 1] + 1]
                    assert tick.terminated[index] == (led[1] == length)
                else:
                    assert index in tick.cut or index in env.given_up()
                    assert (tick.reward[index], tick.terminated[index]) == (0.0, False)
                if index in ends or not tick.valid[index]:
                    assert after[index, 1] == 0
            assert not set(tick.cut) & set(ends)
            seen = after
    except EnvironmentFault:
        assert len(env.incidents()) >= LOSSES
