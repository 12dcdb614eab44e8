"""Tensor games behind the interface of all other environments: exact, and a function of seeds and actions alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from env_streams import record, transitions
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qfleet.core.codec import roundtrip
from qfleet.core.errors import ConfigError
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.envs import GymConfig, RewardShaping, TensorConfig, env_spec, make_env
from qfleet.envs.tensor.games import default_time_limit, make_tensor_env
from qfleet.envs.tensor.protocol import Game, TensorEnv, below
from qfleet.envs.tensor.streams import stream_keys, uniforms
from qfleet.envs.tensor.vector import TensorVector


class Doors(Game):
    """Two leaves and a mask: the room's number, drawn anew in every step, forbids one door; one in eight ends it."""

    draws = 2
    spec = EnvSpec(
        name="doors",
        observations={
            "room": LeafSpec(shape=(), dtype="int64", categories=4),
            "past": LeafSpec(shape=(2,), dtype="float32"),
        },
        actions=4,
        masked=True,
    )

    def start(self, random):
        return {"room": below(random[:, 0], 4), "past": torch.zeros(len(random), 2)}

    def move(self, state, action, random):
        past = torch.stack((state["room"].float(), action.float()), 1)
        return {"room": below(random[:, 0], 4), "past": past}, 10 * random[:, 0] - 5, random[:, 1] < 0.125

    def observe(self, state):
        return {"room": state["room"].clone(), "past": state["past"].clone()}

    def mask(self, state):
        return torch.arange(4) != state["room"][:, None]

    def draw(self, state, index):
        return np.full((2, 2, 3), int(state["room"][index]), np.uint8)


def doors(num_envs: int, shaping: RewardShaping | None = None) -> TensorVector:
    return TensorVector(TensorEnv(Doors(), time_limit=11), num_envs, shaping or RewardShaping())


def made(game: str, num_envs: int) -> TensorVector:
    env = doors(num_envs) if game == "doors" else make_env(TensorConfig(game=game, time_limit=40), num_envs)
    assert isinstance(env, TensorVector)
    return env


GAMES = ["doors", "cartpole", "acrobot", "maze", "catch"]


def script(seed: int, ticks: int, env: TensorVector) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, env.spec.actions, (ticks, env.num_envs))


def test_the_streams_are_those_of_splitmix64():
    """The first outputs of the published generator for the state 1234567."""
    words = np.array(
        [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821],
        np.uint64,
    )
    expected = (words >> np.uint64(40)).astype(np.float64) / 2**24
    key = np.array([1234567], np.uint64)
    np.testing.assert_array_equal(uniforms(key, np.array([0]), 5)[0], expected)
    for tick in range(5):
        assert uniforms(key, np.array([tick]), 1)[0, 0] == expected[tick]


def test_the_streams_are_uniform_and_independent():
    keys = stream_keys(range(1000, 1040))  # seeds that follow one another
    table = np.array([uniforms(keys, np.full(40, tick), 8) for tick in range(600)])  # [T, E, draws]
    assert table.dtype == np.float32
    assert table.min() >= 0
    assert table.max() < 1
    assert stats.kstest(table.ravel(), "uniform").pvalue > 0.001
    cells = np.histogram(table.ravel() * 2**24 % 256, 256, (0, 256))[0]  # the lowest bits
    assert stats.chisquare(cells).pvalue > 0.001
    shifted = table - 0.5
    pairs = {
        "ticks": (shifted[1:], shifted[:-1]),
        "seeds": (shifted[:, 1:], shifted[:, :-1]),
        "draws": (shifted[:, :, 1:], shifted[:, :, :-1]),
    }
    for name, (one, other) in pairs.items():
        score = (one * other).sum(dtype=np.float64) / np.sqrt(one.size) * 12
        assert abs(score) < 4, name
    assert len(np.unique(stream_keys(range(100_000)))) == 100_000


@settings(max_examples=30)
@given(
    seeds=st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=6),
    ticks=st.lists(st.integers(0, 2**40), min_size=6, max_size=6),
    draws=st.integers(0, 5),
)
def test_a_number_depends_on_its_seed_tick_and_place_alone(seeds, ticks, draws):
    ticks = ticks[: len(seeds)]
    together = uniforms(stream_keys(seeds), np.array(ticks), draws)
    assert together.shape == (len(seeds), draws)
    for index, (seed, tick) in enumerate(zip(seeds, ticks, strict=True)):
        alone = uniforms(stream_keys([seed]), np.array([tick]), draws)
        np.testing.assert_array_equal(alone[0], together[index])


@settings(max_examples=20)
@given(game=st.sampled_from(GAMES), seed=st.integers(0, 2**40), count=st.integers(2, 5))
def test_an_environment_does_not_depend_on_the_others(game, seed, count):
    env = made(game, count)
    actions = script(seed, 70, env)
    seeds = [seed + 3 * index for index in range(count)]
    together = transitions(env, seeds, actions)
    again = transitions(env, seeds, actions)
    assert together == again
    for index in (0, count - 1):
        alone = transitions(made(game, 1), seeds[index : index + 1], actions[:, index : index + 1])
        assert alone[0] == together[index]
    if game in ("doors", "cartpole", "acrobot"):
        assert together[0] != together[1]


@settings(max_examples=20)
@given(game=st.sampled_from(GAMES), seed=st.integers(0, 2**40), cut=st.integers(0, 120))
def test_a_cut_anywhere_resumes_to_the_byte(game, seed, cut):
    env, resumed = made(game, 3), made(game, 3)
    assert env.resume_grade == "exact"
    actions = script(seed, cut + 60, env)
    env.reset([seed, seed + 1, seed + 2])
    record(env, actions[:cut])
    resumed.load_state_dict(roundtrip(env.state_dict()))
    assert resumed.resume_grade == "exact"
    assert resumed.cut.tolist() == []
    for mine, theirs in zip(env.current()[0].values(), resumed.current()[0].values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert record(resumed, actions[cut:]) == record(env, actions[cut:])


def test_an_episode_that_cannot_be_continued_is_begun_anew_alone():
    env, resumed = made("cartpole", 3), made("cartpole", 3)
    actions = script(0, 30, env)
    env.reset([1, 2, 3])
    record(env, actions[:5])
    state = roundtrip(env.state_dict())
    state["observation"]["observation"][1] += 1  # as if the physics had become other ones
    resumed.load_state_dict(state)
    assert resumed.cut.tolist() == [1]
    assert resumed.resume_grade == "episode"
    start = resumed.current()[0]["observation"]
    assert (np.abs(start[1]) <= 0.05).all()
    for action in actions[5:]:
        mine, theirs = resumed.step(action), env.step(action)
        np.testing.assert_array_equal(
            mine.observation["observation"][[0, 2]], theirs.observation["observation"][[0, 2]]
        )


def test_the_maze_gives_the_transitions_of_the_small_one():
    tensor = make_env(TensorConfig(game="maze", reward_scale=0.5, reward_clip=3), 4)
    loop = make_env(GymConfig(id="qfleet/Maze-v0", reward_scale=0.5, reward_clip=3), 4)
    assert tensor.spec.replace(name="") == loop.spec.replace(name="")
    actions = np.random.default_rng(3).integers(0, 4, (900, 4))
    ends = 0
    for mine, theirs in zip(transitions(tensor, [1] * 4, actions), transitions(loop, [1] * 4, actions), strict=True):
        assert len(mine) > 880  # a tick of each episode only begins the next
        # Gymnasium's limit also reports what the rules have ended in the same step.
        named = [(*row[:5], row[5] and not row[4], *row[6:]) for row in theirs[: len(mine)]]
        assert mine == named
        ends += sum(ended for _, _, _, _, ended, *_ in mine)
    assert ends > 0


def test_trap_5_the_tick_after_an_end_is_no_transition_and_shows_the_next_start():
    env = make_env(TensorConfig(game="catch"), 2)
    env.reset([1, 2])
    for step in range(1, 31):
        tick = env.step(np.ones(2, np.int64))
        board = tick.observation["observation"][:, 0]
        if step % 10 == 9:  # the ball has landed
            assert tick.terminated.tolist() == tick.valid.tolist() == [True, True]
            assert tick.finished.tolist() == tick.scored.tolist() == [0, 1]
            np.testing.assert_array_equal(tick.final_observation["observation"][:, 0], board)
            assert (board[:, :-1] == 0).all()
            assert tick.score_lengths.tolist() == [9, 9]
            np.testing.assert_array_equal(tick.scores, tick.reward)
        else:
            assert not tick.terminated.any()
            assert len(tick.finished) == 0
            assert tick.valid.tolist() == [step % 10 != 0] * 2
            assert (board[:, step % 10].max(axis=1) == 255).all()
            assert (tick.reward == 0).all()


def test_masks_and_several_leaves_come_with_every_observation():
    env = doors(5, RewardShaping(scale=0.5, clip=2.0))
    observation, mask = env.reset(range(5))
    rng, scores, total, lengths = np.random.default_rng(0), [], np.zeros(5), np.zeros(5, int)
    for number in range(1, 201):
        room = observation["room"]
        np.testing.assert_array_equal(mask, np.arange(4) != room[:, None])
        action = (room + rng.integers(1, 4, 5)) % 4
        tick = env.step(action)
        moved = tick.valid
        np.testing.assert_array_equal(tick.observation["past"][moved], np.stack((room, action), 1)[moved])
        assert (tick.observation["past"][~moved] == 0).all()
        np.testing.assert_array_equal(tick.final_mask, tick.mask[tick.finished])
        np.testing.assert_array_equal(tick.final_observation["room"], tick.observation["room"][tick.finished])
        assert (np.abs(tick.reward) <= 1.0).all()
        raw = 10 * uniforms(stream_keys(range(5)), np.full(5, number), 2)[:, 0] - 5
        np.testing.assert_allclose(tick.reward, np.where(moved, np.clip(raw, -2, 2) / 2, 0), rtol=1e-6)
        total, lengths = total + np.where(moved, raw, 0), lengths + moved
        np.testing.assert_allclose(tick.scores, total[tick.scored], rtol=1e-6)
        np.testing.assert_array_equal(tick.score_lengths, lengths[tick.scored])
        scores += tick.scores.tolist()
        total[tick.scored], lengths[tick.scored] = 0, 0
        observation, mask = tick.observation, tick.mask
    assert len(scores) > 50
    assert env.render().shape == (2, 2, 3)


def test_evaluation_keeps_rewards_and_limit_of_the_game():
    config = TensorConfig(game="cartpole", reward_scale=0.1, time_limit=5)
    learning, judging = make_env(config, 1), make_env(config, 1, evaluation=True)
    for env, reward, length in ((learning, 0.1, 5), (judging, 1.0, None)):
        env.reset([7])
        ticks = [env.step(np.array([step % 2])) for step in range(8)]
        assert ticks[0].reward.tolist() == pytest.approx([reward])
        first = next((number for number, tick in enumerate(ticks, 1) if tick.truncated[0]), None)
        assert first == length
    assert learning.protocol == {"time_limit": 5}
    assert judging.protocol == {"time_limit": 500}
    assert make_tensor_env(config).time_limit == 5
    assert [default_time_limit(game) for game in ("acrobot", "maze", "catch")] == [500, 200, None]


def test_minatar_options_reach_the_game_and_are_stated():
    env = make_env(TensorConfig(game="minatar-breakout", sticky=0.0, ramping=False), 2)
    assert env.protocol == {"sticky": 0.0, "ramping": False, "all_actions": False, "time_limit": 1000}
    assert env.spec.observations["observation"].dtype == "bool"
    env.reset([1, 2])
    assert env.render().shape == (160, 160, 3)
    assert env.step(np.zeros(2, np.int64)).observation["observation"].dtype == bool


@pytest.mark.parametrize(("name", "value"), [("sticky", 0.2), ("ramping", False), ("all_actions", True)])
def test_options_without_effect_are_refused(name, value):
    with pytest.raises(ValueError, match=f"'{name}' is a setting of the MinAtar games; 'maze'"):
        TensorConfig(game="maze", **{name: value})
    assert getattr(TensorConfig(game="minatar-asterix", **{name: value}), name) == value


def test_a_tensor_environment_has_no_factory():
    with pytest.raises(ConfigError, match="not 'tensor'"):
        make_env(TensorConfig(game="maze"), 1, factory=lambda: None)
    assert env_spec(TensorConfig(game="acrobot")).observations["observation"].shape == (6,)
