"""A cut and resumed run of environments equals an uncut one, and what cannot be continued is said to be cut."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import gymnasium
import numpy as np
import pytest
from env_cases import Counting
from env_streams import record
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core.codec import roundtrip
from qfleet.core.errors import CheckpointError
from qfleet.envs import GymConfig, make_env, wrap_vector


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    count=st.integers(1, 4),
    cut=st.integers(0, 600),  # journals are begun anew after 256 steps
    stack=st.integers(1, 3),
    masked=st.booleans(),
)
def test_a_cut_anywhere_resumes_to_the_byte(seed, count, cut, stack, masked):
    config = GymConfig(id="counting", frame_stack=stack)
    factory = partial(Counting, masked=masked)
    actions = np.random.default_rng(seed).integers(0, 3, (cut + 40, count))
    env = make_env(config, count, factory=factory)
    env.reset([seed + index for index in range(count)])
    record(env, actions[:cut])
    state = roundtrip(env.state_dict())
    resumed = make_env(config, count, factory=factory)
    resumed.load_state_dict(state)
    assert resumed.resume_grade == "exact"
    assert resumed.cut.tolist() == []
    for mine, theirs in zip(env.current()[0].values(), resumed.current()[0].values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert record(resumed, actions[cut:]) == record(env, actions[cut:])
    assert record(resumed, actions[:40]) == record(env, actions[:40])


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Taxi-v4", "qfleet/Catch-v0", "qfleet/Identity-v0"])
def test_real_environments_resume_to_the_byte(env_id):
    if env_id == "Taxi-v4" and env_id not in gymnasium.registry:
        env_id = "Taxi-v3"
    config = GymConfig(id=env_id, time_limit=50)
    env, resumed = make_env(config, 3), make_env(config, 3)
    actions = np.random.default_rng(0).integers(0, env.spec.actions, (150, 3))
    env.reset([1, 2, 3])
    record(env, actions[:77])
    resumed.load_state_dict(roundtrip(env.state_dict()))
    assert resumed.cut.tolist() == []
    assert record(resumed, actions[77:]) == record(env, actions[77:])


@pytest.mark.parametrize("masked", [False, True])
def test_environments_in_processes_resume_to_the_byte_and_equal_the_loop(masked):
    factory = partial(Counting, masked=masked)
    actions = np.random.default_rng(0).integers(0, 3, (320, 3))
    logs = []
    for vectorisation in ("async", "sync"):
        config = GymConfig(id="counting", vectorisation=vectorisation)
        with (
            closing(make_env(config, 3, factory=factory)) as env,
            closing(make_env(config, 3, factory=factory)) as resumed,
        ):
            env.reset([4, 5, 6])
            head = record(env, actions[:290])
            resumed.load_state_dict(roundtrip(env.state_dict()))
            assert resumed.cut.tolist() == []
            tail = record(resumed, actions[290:])
            assert tail == record(env, actions[290:])
            logs.append(head + tail)
    assert logs[0] == logs[1]


class Undetermined(Counting):
    """Its second environment draws from a generator that no seed reaches."""

    made = 0

    def __init__(self) -> None:
        super().__init__(longest=1000)
        self._wild = Undetermined.made % 3 == 1
        Undetermined.made += 1

    def step(self, action):
        observation, *rest = super().step(action)
        if self._wild:
            observation[0] = np.random.default_rng().random()
        return observation, *rest


def test_an_undetermined_environment_is_cut_alone_and_lowers_the_grade():
    Undetermined.made = 0
    env = make_env(GymConfig(id="wild"), 3, factory=Undetermined)
    resumed = make_env(GymConfig(id="wild"), 3, factory=Undetermined)
    env.reset([1, 2, 3])
    actions = np.random.default_rng(0).integers(0, 3, (20, 3))
    record(env, actions)
    before = env.current()[0]["observation"]
    resumed.load_state_dict(roundtrip(env.state_dict()))
    assert resumed.cut.tolist() == [1]
    assert resumed.resume_grade == "episode"
    after = resumed.current()[0]["observation"]
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert after[1, 1:].tolist() == [0, -1]
    tick = resumed.step(np.zeros(3, np.int64))
    assert tick.observation["observation"][:, 1].tolist() == [*(before[:1, 1] + 1), 1, *(before[2:, 1] + 1)]


def test_a_vector_without_replay_cuts_every_open_episode():
    def build():
        return wrap_vector(SyncVectorEnv([Counting] * 2), frame_stack=2)

    env, resumed = build(), build()
    assert env.resume_grade == "episode"
    env.reset([1, 2])
    record(env, np.zeros((7, 2), np.int64))
    resumed.load_state_dict(roundtrip(env.state_dict()))
    assert resumed.cut.tolist() == [0, 1]
    assert (resumed.current()[0]["observation"][:, :, 1] == 0).all()
    again = build()
    again.load_state_dict(roundtrip(env.state_dict()))
    np.testing.assert_array_equal(again.current()[0]["observation"], resumed.current()[0]["observation"])


def test_another_number_of_environments_is_refused():
    env = make_env(GymConfig(id="counting"), 2, factory=Counting)
    env.reset([1, 2])
    with pytest.raises(CheckpointError, match="2 environments, this run 3"):
        make_env(GymConfig(id="counting"), 3, factory=Counting).load_state_dict(env.state_dict())
    with pytest.raises(ValueError, match="1 seeds for 2"):
        env.reset([1])


def test_every_episode_of_every_environment_has_a_seed_of_its_own():
    from qfleet.envs.vector import episode_seed

    drawn = {episode_seed(seed, draw) for seed in range(200) for draw in range(1, 200)}
    assert len(drawn) > 0.999 * 200 * 199
    assert all(0 <= value < 2**30 for value in drawn)
    assert episode_seed(7, 0) == 7
