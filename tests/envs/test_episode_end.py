"""One meaning of episode end, whichever way an environment is vectorised and resets itself."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import gymnasium
import numpy as np
import pytest
from env_cases import Counting
from env_streams import transitions
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core.errors import ConfigError
from qfleet.envs import GymConfig, make_env, wrap_vector

COUNTING = GymConfig(id="counting")


class ContinuingSeeds(gymnasium.Wrapper):
    """Seeds an episode with a number that depends on the environment's first seed and the episode alone.

    Gymnasium's own autoreset passes no seed, qfleet's does; this makes the episodes of both the same.
    """

    def reset(self, *, seed=None, options=None):
        if seed is not None and seed < 1000:
            self._first, self._episode = seed, 0
        else:
            self._episode += 1
        return self.env.reset(seed=self._first * 1000 + self._episode, options=options)


def continuing(masked: bool = False) -> gymnasium.Env:
    return ContinuingSeeds(Counting(masked=masked))


def scripted_actions(seed: int, ticks: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 3, (ticks, count))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("frame_stack", [1, 3])
def test_trap_5_all_autoreset_modes_give_the_same_transitions(masked, frame_stack):
    seeds, actions = [3, 14, 15, 92], scripted_actions(0, 80, 4)
    factory = partial(continuing, masked)
    variants = {
        "loop": GymConfig(id="counting", frame_stack=frame_stack),
        "workers": GymConfig(id="counting", frame_stack=frame_stack, vectorisation="async"),
        "sync next": GymConfig(id="counting", frame_stack=frame_stack, autoreset="next_step"),
        "sync same": GymConfig(id="counting", frame_stack=frame_stack, autoreset="same_step"),
        "async same": GymConfig(id="c", frame_stack=frame_stack, autoreset="same_step", vectorisation="async"),
        "async next": GymConfig(id="c", frame_stack=frame_stack, autoreset="next_step", vectorisation="async"),
    }
    streams = {}
    for name, config in variants.items():
        with closing(make_env(config, 4, factory=factory)) as env:
            streams[name] = transitions(env, seeds, actions)
    disabled = SyncVectorEnv([factory] * 4, autoreset_mode=AutoresetMode.DISABLED)
    with closing(wrap_vector(disabled, frame_stack=frame_stack)) as env:
        streams["wrapped disabled"] = transitions(env, seeds, actions)
    reference = streams.pop("loop")
    assert all(any(row[4] for row in stream) and any(row[5] for row in stream) for stream in reference)
    for name, other in streams.items():
        for index, (mine, theirs) in enumerate(zip(reference, other, strict=True)):
            shared = min(len(mine), len(theirs))
            assert shared > 40, name
            assert theirs[:shared] == mine[:shared], f"{name}, environment {index}"


def test_trap_5_next_step_reset_tick_is_not_a_transition():
    env = wrap_vector(SyncVectorEnv([Counting] * 2, autoreset_mode=AutoresetMode.NEXT_STEP))
    env.reset([1, 2])
    ended = np.zeros(2, bool)
    resets = 0
    for action in scripted_actions(1, 60, 2):
        tick = env.step(action)
        assert np.array_equal(~tick.valid, ended)
        assert not (tick.terminated | tick.truncated)[ended].any()
        assert (tick.reward[ended] == 0).all()
        assert (tick.observation["observation"][ended][:, 1] == 0).all()
        resets += int(ended.sum())
        ended = tick.terminated | tick.truncated
    assert resets > 10


def test_trap_5_unknown_autoreset_mode_is_refused():
    env = SyncVectorEnv([Counting] * 2)
    env.metadata = {"autoreset_mode": "whenever"}
    with pytest.raises(ConfigError, match=r"autoreset_mode.*whenever.*NEXT_STEP"):
        wrap_vector(env, "mine")
    env.metadata = {}
    with pytest.raises(ConfigError, match="autoreset_mode"):
        wrap_vector(env, "mine")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 5), ticks=st.integers(1, 40), stack=st.integers(1, 4))
def test_traps_1_and_2_ends_keep_their_kind_and_their_own_final_observation(seed, count, ticks, stack):
    config = GymConfig(id="counting", frame_stack=stack)
    env = make_env(config, count, factory=Counting)
    observation, _ = env.reset([seed + index for index in range(count)])
    frames = observation["observation"].reshape(count, stack, 3)
    scores, steps = np.zeros(count), np.zeros(count, int)
    for action in scripted_actions(seed, ticks, count):
        tick = env.step(action)
        scores += tick.reward
        steps += 1
        ended = tick.terminated | tick.truncated
        assert not (tick.terminated & tick.truncated).any()
        assert tick.finished.tolist() == tick.scored.tolist() == np.flatnonzero(ended).tolist()
        assert tick.score_lengths.tolist() == steps[ended].tolist()
        np.testing.assert_allclose(tick.scores, scores[ended], rtol=1e-5)
        after = tick.observation["observation"].reshape(count, stack, 3)
        finals = tick.final_observation["observation"].reshape(-1, stack, 3)
        for row, index in enumerate(tick.finished.tolist()):
            # the final observation continues the ended episode; the next one begins another
            assert finals[row, -1].tolist() == [frames[index, -1, 0], steps[index], action[index] + 5]
            assert (finals[row, :-1] == frames[index, 1:]).all()
            assert (after[index, :, 1:] == [0, -1]).all()
        for index in np.flatnonzero(~ended):
            assert after[index, -1].tolist() == [frames[index, -1, 0], steps[index], action[index] + 5]
            assert (after[index, :-1] == frames[index, 1:]).all()
        scores[ended], steps[ended] = 0, 0
        frames = after


def test_what_a_tick_holds_is_never_overwritten():
    env = make_env(COUNTING.replace(vectorisation="async"), 3, factory=Counting)
    with closing(env):
        first, _ = env.reset([1, 2, 3])
        ticks = [env.step(action) for action in scripted_actions(2, 30, 3)]
        kept = [first["observation"].copy(), *(tick.observation["observation"].copy() for tick in ticks)]
        ticks[-1].observation["observation"][:] = -7
        assert (env.current()[0]["observation"] != -7).all()
        env.step(np.zeros(3, np.int64))
        assert (first["observation"] == kept[0]).all()
        for tick, copy in zip(ticks[:-1], kept[1:-1], strict=True):
            assert (tick.observation["observation"] == copy).all()


def test_time_limit_truncates_and_never_terminates():
    env = make_env(GymConfig(id="qfleet/Chain-v0", time_limit=5), 1)
    env.reset([0])
    ticks = [env.step(np.zeros(1, np.int64)) for _ in range(10)]
    assert [bool(tick.truncated[0]) for tick in ticks] == [False] * 4 + [True] + [False] * 4 + [True]
    assert not any(tick.terminated[0] for tick in ticks)
    assert make_env(COUNTING.replace(time_limit=1), 1, factory=Counting).reset([0])[0]["observation"].shape == (1, 3)


def test_rewards_are_shaped_for_learning_but_not_for_scores_or_evaluation():
    config = GymConfig(id="counting", reward_clip=12.0, reward_scale=0.5)
    learn, judge = make_env(config, 2, factory=Counting), make_env(config, 2, evaluation=True, factory=Counting)
    raw = []
    learn.reset([5, 6])
    judge.reset([5, 6])
    for action in scripted_actions(3, 40, 2):
        mine, true = learn.step(action), judge.step(action)
        np.testing.assert_array_equal(mine.reward, np.clip(true.reward, -12, 12) * np.float32(0.5))
        np.testing.assert_array_equal(mine.scores, true.scores)
        raw.extend(true.reward.tolist())
    assert max(raw) > 12


def test_native_vector_environment_and_wrong_sizes():
    with closing(make_env(GymConfig(id="CartPole-v1", vectorisation="native", time_limit=20), 3)) as env:
        env.reset([1, 2, 3])
        ticks = [env.step(np.array([0, 1, index % 2])) for index in range(60)]
        assert sum(len(tick.finished) for tick in ticks) > 5
        assert sum((~tick.valid).sum() for tick in ticks) > 5
        again, _ = env.reset([1, 2, 3])
        first, _ = make_env(GymConfig(id="CartPole-v1", vectorisation="native"), 3).reset([1, 2, 3])
        np.testing.assert_array_equal(again["observation"], first["observation"])
    with pytest.raises(ConfigError, match="has 2 environments, 5 are asked for"):
        make_env(COUNTING, 5, factory=lambda: SyncVectorEnv([Counting] * 2))
    assert make_env(COUNTING, 2, factory=lambda: SyncVectorEnv([Counting] * 2)).num_envs == 2


def test_rendering_environment_0():
    for vectorisation in ("sync", "async"):
        config = GymConfig(id="qfleet/Catch-v0", vectorisation=vectorisation)
        with closing(make_env(config, 2, render=True)) as env:
            env.reset([0, 1])
            assert env.render().shape == (160, 80, 3)
    env = make_env(GymConfig(id="qfleet/Catch-v0"), 1)
    env.reset([0])
    with pytest.raises(ConfigError, match="render"):
        env.render()


def test_environments_in_processes_resume_exactly_and_gymnasiums_own_vectors_do_not():
    grades = {}
    for autoreset in ("auto", "same_step"):
        config = COUNTING.replace(vectorisation="async", autoreset=autoreset)
        with closing(make_env(config, 2, factory=Counting)) as env:
            grades[autoreset] = env.resume_grade
    assert grades == {"auto": "exact", "same_step": "episode"}
