"""Observations and actions of every supported space arrive whole and in order."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from env_cases import Counting, Spaced
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core.errors import ConfigError
from qfleet.core.spec import PLAIN
from qfleet.envs import GymConfig, env_spec, make_env, wrap_vector

CUSTOM = GymConfig(id="custom")


def test_a_nested_observation_becomes_dotted_leaves():
    space = spaces.Dict(
        arm=spaces.Dict(angle=spaces.Box(-1, 1, (2,), np.float64), joint=spaces.Discrete(4, start=10)),
        pair=spaces.Tuple([spaces.MultiBinary(3), spaces.MultiDiscrete([2, 5])]),
        image=spaces.Box(0, 255, (1, 4, 4), np.uint8),
    )
    inner = Spaced(space)
    env = make_env(CUSTOM, 1, factory=lambda: inner)
    spec = env.spec.observations
    assert {name: (leaf.shape, leaf.dtype, leaf.categories) for name, leaf in spec.items()} == {
        "arm.angle": ((2,), "float32", None),
        "arm.joint": ((), "int64", 4),
        "image": ((1, 4, 4), "uint8", None),
        "pair.0": ((3,), "int8", None),
        "pair.1": ((2,), "int64", None),
    }
    assert not env.spec.plain
    observation, mask = env.reset([3])
    assert mask is None
    for _ in range(20):
        assert observation["arm.joint"][0] == inner.last["arm"]["joint"] - 10
        np.testing.assert_array_equal(observation["arm.angle"][0], inner.last["arm"]["angle"].astype(np.float32))
        np.testing.assert_array_equal(observation["pair.0"][0], inner.last["pair"][0])
        np.testing.assert_array_equal(observation["pair.1"][0], inner.last["pair"][1])
        np.testing.assert_array_equal(observation["image"][0], inner.last["image"])
        assert {name: leaf.dtype.name for name, leaf in observation.items()} == {n: s.dtype for n, s in spec.items()}
        observation = env.step(np.zeros(1, np.int64)).observation


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_nested_observations_of_a_vector_equal_those_of_the_loop(mode):
    space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)]))
    with_vector = wrap_vector(SyncVectorEnv([lambda: Spaced(space)] * 2, autoreset_mode=mode))
    by_loop = make_env(CUSTOM, 2, factory=lambda: Spaced(space))
    assert with_vector.spec.observations == by_loop.spec.observations
    with_vector.reset([1, 2])
    by_loop.reset([1, 2])
    for _ in range(7):
        one, other = with_vector.step(np.zeros(2, np.int64)), by_loop.step(np.zeros(2, np.int64))
    for name, final in other.final_observation.items():
        np.testing.assert_array_equal(one.final_observation[name], final)
    assert len(other.finished) == 2


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), start=st.integers(-3, 3))
def test_joint_actions_name_every_combination_once(sizes, start):
    space = spaces.MultiDiscrete(sizes, start=[start] * len(sizes))
    inner = Spaced(spaces.Discrete(2), space)
    env = make_env(CUSTOM, 1, factory=lambda: inner)
    assert env.spec.actions == np.prod(sizes)
    assert env.spec.action_shape == tuple(sizes)
    env.reset([0])
    for number in range(env.spec.actions):
        env.step(np.array([number]))
    expected = np.stack(np.unravel_index(np.arange(env.spec.actions), sizes), axis=1) + start
    np.testing.assert_array_equal(np.array(inner.actions), expected)


def test_discrete_start_and_multi_binary_actions():
    inner = Spaced(spaces.Discrete(2), spaces.Discrete(3, start=-1))
    env = make_env(CUSTOM, 1, factory=lambda: inner)
    env.reset([0])
    for number in range(3):
        env.step(np.array([number]))
    assert inner.actions == [-1, 0, 1]
    assert (env.spec.actions, env.spec.action_start) == (3, -1)
    inner = Spaced(spaces.Discrete(2), spaces.MultiBinary(3))
    env = make_env(CUSTOM, 1, factory=lambda: inner)
    env.reset([0])
    env.step(np.array([6]))
    assert inner.actions[0].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (spaces.MultiDiscrete([20, 20, 20]), "20 x 20 x 20 = 8,000 joint actions; at most 4,096"),
        (spaces.Discrete(5000), "5,000 joint actions"),
        (spaces.Dict(a=spaces.Discrete(2)), "actions are a Dict space"),
        (spaces.Box(-1, 1, (2,)), "continuous actions.*TorchRL"),
    ],
)
def test_actions_that_cannot_be_learned_are_refused(action, says):
    with pytest.raises(ConfigError, match=says):
        make_env(CUSTOM, 1, factory=lambda: Spaced(spaces.Discrete(2), action))


def test_observations_that_cannot_be_learned_are_refused():
    space = spaces.Dict(name=spaces.Text(5), x=spaces.Discrete(2))
    with pytest.raises(ConfigError, match="'name' is a Text space"):
        make_env(CUSTOM, 1, factory=lambda: Spaced(space))


def test_a_mask_in_the_observation_is_taken_out_of_it():
    space = spaces.Dict(observation=spaces.Box(-1, 1, (2,)), action_mask=spaces.Box(0, 1, (2,), np.int8))
    inner = Spaced(space)
    env = make_env(CUSTOM, 1, factory=lambda: inner)
    assert env.spec.masked
    assert env.spec.plain
    observation, mask = env.reset([0])
    masks = []
    for _ in range(15):
        assert mask is not None
        np.testing.assert_array_equal(observation[PLAIN][0], inner.last["observation"])
        np.testing.assert_array_equal(mask[0], inner.last["action_mask"].astype(bool))
        masks.append(mask[0].tolist())
        tick = env.step(np.zeros(1, np.int64))
        observation, mask = tick.observation, tick.mask
    assert [True, False] in masks
    assert [True, True] in masks
    three = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(3), action_mask=spaces.MultiBinary(2))
    assert list(env_spec(CUSTOM, lambda: Spaced(three)).observations) == ["a", "b"]


def test_a_mask_in_the_info_is_found():
    taxi = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"
    env = make_env(GymConfig(id=taxi), 2)
    _, mask = env.reset([1, 2])
    assert env.spec.masked
    assert env.spec.observations[PLAIN].categories == 500
    for _ in range(250):
        assert mask is not None
        tick = env.step(np.array([np.flatnonzero(row)[0] for row in mask]))
        assert tick.final_mask is not None
        assert len(tick.final_mask) == len(tick.finished)
        mask = tick.mask


def test_frame_stack_leaves_categories_alone():
    space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3))
    spec = env_spec(GymConfig(id="custom", frame_stack=4, vectorisation="async"), lambda: Spaced(space))
    assert (spec.observations["a"].shape, spec.observations["a"].stack) == ((4, 2), 4)
    assert spec.observations["a"].stack_padding == "repeat"
    assert (spec.observations["b"].shape, spec.observations["b"].stack) == ((), 1)


def test_a_config_goes_through_json_and_refuses_unknown_keys():
    config = GymConfig(id="qfleet/Maze-v0", kwargs={"layout": "SG", "n": 3, "x": 0.5, "flag": True})
    assert GymConfig.model_validate_json(config.model_dump_json()) == config
    assert type(config.kwargs["n"]) is int
    with pytest.raises(ValueError, match="frame_stak"):
        GymConfig(id="x", frame_stak=4)
    assert env_spec(CUSTOM, Counting).name == "custom"


def test_a_native_vector_cannot_be_told_how_to_reset():
    with pytest.raises(ValueError, match="leave autoreset at 'auto'"):
        GymConfig(id="CartPole-v1", vectorisation="native", autoreset="disabled")
