"""Every tensor game is also an ordinary Gymnasium environment, and is not loaded before it is made."""

from __future__ import annotations

import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from qfleet.core.errors import ConfigError
from qfleet.envs import GymConfig, TensorConfig, env_spec
from qfleet.envs.tensor.games import make_tensor_env

IDS = {
    "cartpole": "qfleet/CartPole-v1",
    "acrobot": "qfleet/Acrobot-v1",
    "maze": "qfleet/TensorMaze-v1",
    "catch": "qfleet/TensorCatch-v1",
    "minatar-breakout": "qfleet/MinAtar-Breakout-v1",
    "minatar-asterix": "qfleet/MinAtar-Asterix-v1",
    "minatar-freeway": "qfleet/MinAtar-Freeway-v1",
    "minatar-seaquest": "qfleet/MinAtar-Seaquest-v1",
    "minatar-space_invaders": "qfleet/MinAtar-SpaceInvaders-v1",
}
GAMES = pytest.mark.parametrize("game", IDS)


@GAMES
def test_gymnasium_finds_nothing_wrong(game):
    env = gymnasium.make(IDS[game], render_mode="rgb_array")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        check_env(env.unwrapped, skip_render_check=False)
    unbounded = game in ("cartpole", "acrobot")  # as speeds of the original CartPole are
    assert all("infinity" in str(warning.message) for warning in seen)
    assert bool(seen) == unbounded
    env.reset(seed=1)
    picture = env.render()
    assert picture.dtype == np.uint8
    assert picture.ndim == picture.shape[2] == 3
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 1


@GAMES
def test_it_plays_as_the_tensors_do_with_the_same_numbers(game):
    env, tensors = gymnasium.make(IDS[game]), make_tensor_env(TensorConfig(game=game))
    assert env.spec.max_episode_steps == tensors.time_limit
    twin, rng = np.random.default_rng(5), np.random.default_rng(0)
    observation, _ = env.reset(seed=5)
    state = tensors.reset(torch.from_numpy(twin.random((1, tensors.draws), dtype=np.float32)))
    for _ in range(300):
        np.testing.assert_array_equal(tensors.observe(state)["observation"][0].numpy(), observation)
        assert observation in env.observation_space
        if state["ended"]:
            observation, _ = env.reset()
            reward, ended, stopped, action = 0.0, False, False, 0
        else:
            action = int(rng.integers(env.action_space.n))
            observation, reward, ended, stopped, _ = env.step(action)
        random = torch.from_numpy(twin.random((1, tensors.draws), dtype=np.float32))
        state, outcome = tensors.step(state, torch.tensor([action]), random)
        assert (float(outcome.reward), bool(outcome.terminated), bool(outcome.truncated)) == (reward, ended, stopped)


@GAMES
def test_an_agent_sees_the_same_either_way(game):
    ordinary, tensors = env_spec(GymConfig(id=IDS[game])), env_spec(TensorConfig(game=game))
    assert ordinary.replace(name="") == tensors.replace(name="")


def test_options_go_to_the_game():
    small = gymnasium.make("qfleet/TensorCatch-v1", rows=4, columns=3)
    assert small.observation_space.shape == (1, 4, 3)
    assert gymnasium.make("qfleet/MinAtar-Breakout-v1", sticky=0.0).unwrapped.render() is None
    with pytest.raises(ConfigError, match="sticky"):
        gymnasium.make("qfleet/TensorCatch-v1", sticky=0.0)


def test_registering_loads_no_tensors():
    code = (
        "import sys, gymnasium, qfleet.envs\n"
        "assert 'qfleet/MinAtar-Breakout-v1' in gymnasium.registry\n"
        "print('torch' in sys.modules, 'qfleet.envs.tensor.protocol' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sticky": 2.0}, "sticky"),
        ({"sticky": "often"}, "sticky"),
        ({"stick": 0.1}, "did you mean"),
        ({"reward_scale": 0.5}, "no option 'reward_scale'"),
    ],
)
def test_options_are_checked_as_the_command_line_checks_them(options, named):
    with pytest.raises(ConfigError, match=f"(?i){named}"):
        gymnasium.make("qfleet/MinAtar-Breakout-v1", **options)


def test_options_that_a_game_does_not_have_are_refused():
    with pytest.raises(ConfigError, match="no option 'sticky'"):
        gymnasium.make("qfleet/CartPole-v1", sticky=0.5)


@pytest.mark.parametrize("action", [3, -1, 1.5, None, np.array([0, 1])])
def test_an_action_outside_of_the_space_is_refused(action):
    env = gymnasium.make("qfleet/MinAtar-Breakout-v1").unwrapped
    env.reset(seed=0)
    with pytest.raises(ValueError, match="a whole number from 0 to 2"):
        env.step(action)
    for allowed in (2, np.int64(1), np.array(0), torch.tensor(1)):
        env.step(allowed)
