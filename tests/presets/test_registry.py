"""Presets are found by name, prefix or import, and what cannot be found says what to do."""

from __future__ import annotations

import re

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment
from qfleet.presets import preset
from qfleet.presets.registry import PRESETS, describe


class Toy(gymnasium.Env):
    """An environment with any observation space."""

    def __init__(self, space):
        self.observation_space, self.action_space = space, spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, True, False, {}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_reloads_from_its_own_yaml(name, tmp_path):
    experiment = preset(name)
    path = tmp_path / "config.yaml"
    path.write_text(experiment.to_yaml())
    assert Experiment.from_yaml(path) == experiment
    assert experiment.preset == name


def test_describe_has_one_line_for_each_preset_and_form():
    lines = describe()
    assert set(lines) == {*PRESETS, "minatar:GAME", "atari:GAME", "atari-fast:GAME", "gym:ID"}
    assert all(line and "\n" not in line for line in lines.values())


@pytest.mark.parametrize(
    ("space", "kind", "stack"),
    [
        (spaces.Box(-1.0, 1.0, (5,)), "mlp", 1),
        (spaces.Discrete(7), "mlp", 1),
        (spaces.Box(0, 255, (96, 96, 3), np.uint8), "nature", 4),
        (spaces.Box(0, 255, (10, 10), np.uint8), "small_cnn", 1),
        (
            spaces.Dict({"image": spaces.Box(0, 255, (64, 64, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,))}),
            "nature",
            1,
        ),
    ],
)
def test_gym_chooses_the_network_from_the_spaces(space, kind, stack):
    experiment = preset("gym:", factory=lambda: Toy(space))
    assert (experiment.network.kind, experiment.env.frame_stack) == (kind, stack)
    assert experiment.network.input.normalize


def test_many_categories_get_a_learned_vector():
    assert preset("gym:", factory=lambda: Toy(spaces.Discrete(500))).network.input.embedding == 22
    assert preset("gym:", factory=lambda: Toy(spaces.Discrete(7))).network.input.embedding == 0


def test_large_images_do_not_fill_the_memory():
    space = spaces.Box(0, 255, (210, 160, 3), np.uint8)
    experiment = preset("gym:", factory=lambda: Toy(space))
    assert experiment.replay.capacity * 210 * 160 * 3 <= 2 * 2**30


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cartpol", "Did you mean 'cartpole'"),
        ("gym:", "gym:CartPole-v1"),
        ("atari:", "atari:pong"),
        ("gym:CartPole-v99", "CartPole"),
        ("no_such_module_of_mine:build", "PYTHONPATH"),
        ("math:no_such_function", "has no function"),
        ("math:pi", "cannot be called"),
        ("math:sqrt", "without arguments"),
        ("os:getcwd", "must return a qfleet Experiment"),
    ],
)
def test_what_is_not_a_preset_is_refused_with_advice(name, said):
    with pytest.raises(ConfigError, match=said):
        preset(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("minatar", "write minatar:GAME, as in minatar:breakout"),
        ("gym:minatar:breakout", "qfleet.train('minatar:breakout')"),
        ("gym:cartpole", "qfleet.train('cartpole')"),
    ],
)
def test_the_name_that_was_meant_is_told(name, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        preset(name)


def test_an_importable_function_is_a_preset_and_prefixes_win(tmp_path, monkeypatch):
    source = (
        "from qfleet.envs import GymConfig\nfrom qfleet.experiment import Experiment\n\n\n"
        "def mine():\n    return Experiment(env=GymConfig(id='CartPole-v1'))\n"
    )
    (tmp_path / "own_experiments.py").write_text(source)
    (tmp_path / "gym.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert preset("own_experiments:mine").preset == "own_experiments:mine"
    with pytest.raises(ConfigError, match="mine"):
        preset("gym:mine")


def test_a_factory_goes_with_gym_alone():
    with pytest.raises(ConfigError, match="gym:"):
        preset("cartpole", factory=lambda: Toy(spaces.Discrete(3)))
