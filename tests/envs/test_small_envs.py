"""Our own environments keep Gymnasium's contract and have the best values that they claim."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import qfleet.envs  # noqa: F401  (registers them)
from qfleet.core.errors import ConfigError
from qfleet.envs import GymConfig, env_spec
from qfleet.envs.small.chain import LEFT, RIGHT, Chain
from qfleet.envs.small.maze import Maze


@pytest.mark.parametrize("name", ["Identity", "Chain", "Catch", "Maze", "Recall"])
@pytest.mark.filterwarnings("error")
def test_gymnasium_finds_nothing_wrong(name):
    env = gymnasium.make(f"qfleet/{name}-v0", render_mode="ansi")
    check_env(env.unwrapped, skip_render_check=False)
    assert isinstance(env.unwrapped.render(), str)


def test_identity_pays_for_the_right_name_only():
    env = gymnasium.make("qfleet/Identity-v0", size=3, length=5, one_hot=True)
    observation, _ = env.reset(seed=0)
    rewards = []
    for step in range(5):
        assert observation.sum() == 1
        right = int(observation.argmax())
        observation, reward, ended, _, _ = env.step(right if step % 2 else (right + 1) % 3)
        rewards.append(reward)
        assert ended == (step == 4)
    assert rewards == [0, 1, 0, 1, 0]


def test_chain_has_the_value_of_its_closed_form():
    gamma, length = 0.9, 6
    q = Chain(length=length, small=0.01, large=1.0).model().optimal_q(gamma)
    for state in range(length - 1):
        assert q[state, RIGHT] == pytest.approx(gamma ** (length - 2 - state))
    assert q[0, LEFT] == pytest.approx(0.01 + gamma * q[0].max())
    assert Chain(length=30, small=0.5).model().optimal_q(gamma)[0, LEFT] == pytest.approx(0.5 / (1 - gamma))


def test_catch_can_always_be_won_by_following_the_ball():
    env = gymnasium.make("qfleet/Catch-v0", render_mode="rgb_array")
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        ended, total, steps = False, 0.0, 0
        while not ended:
            ball, paddle = observation[0, :-1].any(axis=0).argmax(), observation[0, -1].argmax()
            observation, reward, ended, _, _ = env.step(int(np.sign(ball - paddle)) + 1)
            total, steps = total + reward, steps + 1
        assert (total, steps) == (1.0, 9)
        assert env.render().shape == (160, 80, 3)


def test_recall_pays_for_naming_what_was_shown_first():
    env = gymnasium.make("qfleet/Recall-v0", length=3, cues=3, render_mode="rgb_array")
    seen = set()
    for seed in range(30):
        cue, _ = env.reset(seed=seed)
        seen.add(cue)
        shown = [env.step(0) for _ in range(4)]
        assert [step[0] for step in shown] == [3, 3, 3, 4]
        assert not any(step[1] or step[2] or step[3] for step in shown)
        answer = cue if seed % 2 else (cue + 1) % 3
        _, reward, ended, _, _ = env.step(answer)
        assert (reward, ended) == (float(seed % 2), True)
    assert seen == {0, 1, 2}
    assert env.render().shape == (32, 160, 3)


def test_maze_rewards_and_values_are_those_of_the_shortest_path():
    env = Maze("#####\n#S.G#\n#####")
    model = env.model()
    env.reset(seed=0)
    assert env.step(0)[:3] == (6, -1.0, False)  # a wall holds one back
    assert env.step(1)[:3] == (7, -1.0, False)
    assert env.step(1)[:3] == (8, 10.0, True)
    q = model.optimal_q(0.9)
    assert q[7, 1] == pytest.approx(10.0)
    assert q[6, 1] == pytest.approx(-1 + 0.9 * 10)
    assert q[6, 3] == pytest.approx(-1 + 0.9 * q[6, 1])


def test_maze_steps_follow_its_model():
    env = Maze()
    model = env.model()
    cell, _ = env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(500):
        action = int(rng.integers(4))
        after, reward, ended, _, _ = env.step(action)
        assert (after, reward, ended) == (
            model.next_state[cell, action],
            model.reward[cell, action],
            model.terminal[cell, action],
        )
        cell = env.reset()[0] if ended else after


def test_maze_greedy_on_q_star_reaches_the_goal():
    env = Maze()
    q = env.model().optimal_q(0.9)
    cell, _ = env.reset(seed=0)
    for _ in range(50):
        cell, _, ended, _, _ = env.step(int(q[cell].argmax()))
        if ended:
            return
    pytest.fail("the goal was not reached")


def test_maze_is_drawn_in_text_and_as_png(tmp_path):
    image = pytest.importorskip("PIL.Image")
    env = Maze("#####\n#S G#\n#####", render_mode="ansi")
    env.reset(seed=0)
    assert env.render() == "#####\n#@.G#\n#####"
    env.save_png(tmp_path / "maze.png")
    picture = np.asarray(image.open(tmp_path / "maze.png"))
    np.testing.assert_array_equal(picture, env.image())
    assert picture.shape == (48, 80, 3)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) == 4


@pytest.mark.parametrize("layout", ["", "S..", "..G", "SSG", "S?G"])
def test_a_maze_without_start_or_goal_is_refused(layout):
    with pytest.raises(ConfigError, match="the maze has"):
        Maze(layout)


def test_small_environments_through_the_adapter():
    assert env_spec(GymConfig(id="qfleet/Maze-v0")).observations["observation"].categories == 72
    assert env_spec(GymConfig(id="qfleet/Catch-v0")).observations["observation"].shape == (1, 10, 5)
