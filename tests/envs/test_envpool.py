"""EnvPool gives the same ticks as any other vector that resets itself on the next step."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from env_streams import record
from test_atari import check_stacks

from qfleet.core.codec import roundtrip
from qfleet.core.errors import ConfigError
from qfleet.core.spec import PLAIN
from qfleet.envs import EnvPoolConfig, env_spec, make_env

pytest.importorskip("envpool")
PONG = EnvPoolConfig(id="Pong-v5", kwargs={"max_episode_steps": 40}, reward_clip=1.0, threads=1)


def test_pong_stacks_equal_those_rebuilt_from_single_frames():
    with closing(make_env(PONG, 2)) as env:
        leaf = env.spec.observations[PLAIN]
        assert (leaf.shape, leaf.stack, leaf.stack_padding) == ((4, 84, 84), 4, "repeat")
        assert check_stacks(env, [1, 2], 100) >= 4
        assert env.render().shape == (84, 84, 3)


def test_trap_17_the_protocol_is_stated():
    with closing(make_env(PONG, 1)) as env:
        stated = env.protocol
        assert (stated["reward_clip"], stated["noop_max"], stated["frame_skip"]) == (False, 30, 4)
        assert "repeat_action_probability" in stated


def test_cartpole_ends_resets_and_repeats_by_its_seeds():
    with closing(make_env(EnvPoolConfig(id="CartPole-v1", threads=1), 3)) as env:
        actions = np.random.default_rng(0).integers(0, 2, (120, 3))
        env.reset([1, 2, 3])
        ended, scores = np.zeros(3, bool), []
        for action in actions:
            tick = env.step(action)
            assert np.array_equal(~tick.valid, ended)
            assert (tick.reward == tick.valid).all()
            scores += tick.scores.tolist()
            assert tick.scores.tolist() == tick.score_lengths.tolist()
            ended = tick.terminated | tick.truncated
        assert len(scores) > 6
        env.reset([1, 2, 3])
        first = record(env, actions)
        env.reset([1, 2, 3])
        assert record(env, actions) == first


def test_a_resume_cuts_open_episodes():
    config = EnvPoolConfig(id="CartPole-v1", threads=1)
    with closing(make_env(config, 2)) as env, closing(make_env(config, 2)) as resumed:
        env.reset([1, 2])
        record(env, np.ones((5, 2), np.int64))
        resumed.load_state_dict(roundtrip(env.state_dict()))
        assert resumed.resume_grade == "episode"
        assert resumed.cut.tolist() == [0, 1]
        resumed.step(np.zeros(2, np.int64))


def test_options_that_qfleet_owns_and_typos_are_refused():
    for key in ("seed", "reward_clip", "episodic_life"):
        with pytest.raises(ValueError, match=key):
            EnvPoolConfig(id="Pong-v5", kwargs={key: 1})
    with pytest.raises(ConfigError, match="Did you mean 'Pong-v5'"):
        env_spec(EnvPoolConfig(id="Pong-v55"))
    with pytest.raises(ConfigError, match="colour"):
        env_spec(EnvPoolConfig(id="CartPole-v1", kwargs={"colour": 3}))
