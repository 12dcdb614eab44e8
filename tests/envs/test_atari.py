"""Atari through ale-py: the protocol, lives, scores, stacks from single frames, and exact resume."""

from __future__ import annotations

import gc
import weakref
from contextlib import closing

import numpy as np
import pytest
from env_streams import record

from qfleet.core.codec import roundtrip
from qfleet.core.errors import ConfigError, EnvironmentFault
from qfleet.core.spec import PLAIN, LeafSpec
from qfleet.envs import AtariConfig, env_spec, make_env

pytest.importorskip("ale_py")
PONG = AtariConfig(game="pong", max_frames=160, threads=1)
BREAKOUT = AtariConfig(game="breakout", life_loss=True, threads=1)


def rebuild(frames: list[np.ndarray], leaf: LeafSpec) -> np.ndarray:
    """Return the stack that ends with the last of an episode's single frames, as a replay would build it."""
    first = np.zeros_like(frames[0]) if leaf.stack_padding == "zero" else frames[0]
    return np.stack(([first] * (leaf.stack - 1) + frames)[-leaf.stack :])


def check_stacks(env, seeds: list[int], ticks: int) -> int:
    """Step at random and compare every stack with the one rebuilt from single frames; return the episodes seen."""
    leaf = env.spec.observations[PLAIN]
    observation, _ = env.reset(seeds)
    frames = [[stack[-1]] for stack in observation[PLAIN]]
    rng, episodes = np.random.default_rng(0), 0
    for _ in range(ticks):
        tick = env.step(rng.integers(0, env.spec.actions, env.num_envs))
        for row, index in enumerate(tick.finished.tolist()):
            final = tick.final_observation[PLAIN][row]
            np.testing.assert_array_equal(final, rebuild([*frames[index], final[-1]], leaf))
            frames[index] = []
            episodes += 1
        for index, stack in enumerate(tick.observation[PLAIN]):
            if not tick.valid[index]:
                frames[index] = []
            if index in tick.finished and (stack == tick.final_observation[PLAIN][tick.finished == index][0]).all():
                continue  # the reset comes with the next tick; nothing is learned from this observation
            frames[index].append(stack[-1])
            np.testing.assert_array_equal(stack, rebuild(frames[index], leaf))
    return episodes


def test_pong_stacks_equal_those_rebuilt_from_single_frames():
    with closing(make_env(PONG, 2)) as env:
        leaf = env.spec.observations[PLAIN]
        assert (leaf.shape, leaf.dtype, leaf.stack, leaf.stack_padding) == ((4, 84, 84), "uint8", 4, "zero")
        assert check_stacks(env, [1, 2], 120) >= 4


def test_trap_6_stacks_begin_anew_after_a_lost_life():
    with closing(make_env(BREAKOUT, 2)) as env:
        assert check_stacks(env, [1, 2], 150) >= 4


def test_trap_6_a_lost_life_ends_the_episode_but_neither_the_game_nor_its_score():
    learn, judge = make_env(BREAKOUT, 1), make_env(BREAKOUT, 1, evaluation=True)
    with closing(learn), closing(judge):
        learn.reset([1])
        judge.reset([1])
        rng = np.random.default_rng(3)
        lost, games = 0, 0
        for _ in range(700):
            action = rng.integers(0, 4, 1)
            mine, true = learn.step(action), judge.step(action)
            assert mine.scores.tolist() == true.scores.tolist()
            assert mine.score_lengths.tolist() == true.score_lengths.tolist()
            assert true.terminated.tolist() == [len(true.scored) > 0]
            # the game goes on: its newest frame is the same with and without the ends
            np.testing.assert_array_equal(mine.observation[PLAIN][:, -1], true.observation[PLAIN][:, -1])
            assert mine.valid.tolist() == true.valid.tolist()
            lost += len(mine.finished) - len(mine.scored)
            games += len(mine.scored)
        assert games >= 2
        assert lost == pytest.approx(4 * games, abs=4)


def test_trap_17_the_protocol_is_stated_and_rewards_are_clipped_for_learning_only():
    config = AtariConfig(game="space_invaders", threads=1)
    learn, judge = make_env(config, 1), make_env(config, 1, evaluation=True)
    with closing(learn), closing(judge):
        stated = learn.protocol
        assert (stated["sticky_actions"], stated["noop_max"], stated["reward_clip"]) == (0.0, 30, 1.0)
        assert (stated["frame_skip"], stated["frame_stack"], stated["life_loss"]) == (4, 4, False)
        learn.reset([1])
        judge.reset([1])
        total, rng = 0.0, np.random.default_rng(0)
        for _ in range(250):
            action = rng.integers(0, 6, 1)
            mine, true = learn.step(action), judge.step(action)
            np.testing.assert_array_equal(mine.reward, np.clip(true.reward, -1, 1))
            total += float(true.reward.sum())
        assert total >= 10  # one invader pays at least 5


def resumes_exactly(config: AtariConfig, cut: int, ticks: int) -> list[object]:
    env, resumed = make_env(config, 2), make_env(config.replace(threads=2), 2)
    with closing(env), closing(resumed):
        actions = np.random.default_rng(1).integers(0, env.spec.actions, (ticks, 2))
        env.reset([5, 6])
        head = record(env, actions[:cut])
        resumed.load_state_dict(roundtrip(env.state_dict()))
        assert resumed.cut.tolist() == []
        assert resumed.resume_grade == "exact"
        tail = record(env, actions[cut:])
        assert record(resumed, actions[cut:]) == tail
        return head + tail


def test_pong_resumes_to_the_byte_at_an_end_in_its_reset_and_across_reseeding():
    config = PONG.replace(reseed_every=60, sticky_actions=0.25)
    # games last 40 steps: the first end has just come at 40, and a reseeding at 81
    logs = [resumes_exactly(config, cut, 125) for cut in (40, 90)]
    assert logs[0] == logs[1]


def test_breakout_resumes_to_the_byte_with_lives():
    resumes_exactly(BREAKOUT, 60, 110)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 39, 42, 60, 81, 82, 83, 119, 123])
@pytest.mark.parametrize("game", ["pong", "breakout", "seaquest"])
def test_resume_at_many_cuts(game, cut):
    config = AtariConfig(game=game, max_frames=160, reseed_every=60, sticky_actions=0.25, life_loss=True, threads=1)
    resumes_exactly(config, cut, 200)


def test_reseeding_bounds_the_log():
    with closing(make_env(PONG.replace(reseed_every=50), 1)) as env:
        env.reset([0])
        for _ in range(300):
            env.step(np.zeros(1, np.int64))
            assert len(env.state_dict()["backend"]["actions"]) <= 50 + 41


def test_spec_full_action_set_render_and_a_typo():
    assert env_spec(AtariConfig(game="pong")).actions == 6
    assert env_spec(AtariConfig(game="pong", full_action_set=True)).actions == 18
    with closing(make_env(PONG, 1, evaluation=True, render=True)) as env:
        env.reset([2**40])
        assert env.render().shape == (84, 84, 3)
    with pytest.raises(ConfigError, match="Did you mean 'space_invaders'"):
        env_spec(AtariConfig(game="spaceinvaders"))
    with pytest.raises(ConfigError, match="factory"):
        make_env(PONG, 1, factory=lambda: None)


@pytest.mark.parametrize(("what", "where"), [("reset", "reset"), ("step", "send"), ("step", "recv")])
def test_an_exception_inside_ale_py_is_a_fault_that_names_the_game(what, where, monkeypatch):
    from ale_py.vector_env import AtariVectorEnv

    def fail(*args, **kwargs):
        raise RuntimeError("emulator lost")

    with closing(make_env(PONG, 2)) as env:
        if what == "step":
            env.reset([1, 2])
        monkeypatch.setattr(AtariVectorEnv, where, fail)
        with pytest.raises(EnvironmentFault, match=rf"atari:pong.*{what}\(\) raised RuntimeError: emulator lost"):
            env.step(np.zeros(2, np.int64)) if what == "step" else env.reset([1, 2])


def test_an_exception_while_ale_py_makes_the_game_names_the_game(monkeypatch):
    from ale_py import vector_env

    def fail(*args, **kwargs):
        raise RuntimeError("no memory for the console")

    monkeypatch.setattr(vector_env, "AtariVectorEnv", fail)
    with pytest.raises(ConfigError, match="atari:pong cannot be made: RuntimeError: no memory for the console"):
        make_env(PONG, 2)


def test_closed_games_are_let_go_of():
    """A process that ended with them in its hands printed a page of complaints."""
    env = make_env(AtariConfig(game="pong"), 1)
    games = weakref.ref(env._env)
    env.close()
    gc.collect()
    assert games() is None
    env.close()
