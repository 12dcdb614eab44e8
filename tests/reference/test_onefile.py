"""The one-file reference: its parts are right, and it learns."""

from __future__ import annotations

import argparse
import ast
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onefile_module import PATH, onefile


def arguments(*flags: str) -> argparse.Namespace:
    parsed: argparse.Namespace = onefile.parse_args(flags)
    return parsed


# ------------------------------------------------------------------------------------------------------ the page itself


def test_is_one_page_and_imports_nothing_of_the_package() -> None:
    text = PATH.read_text()
    assert len(text.splitlines()) <= 300
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"torch", "numpy", "gymnasium"}


# ----------------------------------------------------------------------------------------------------- n-step windows


@st.composite
def histories(draw: st.DrawFn) -> list[Any]:
    """Consecutive ticks of a few environments; observations name (environment, episode, step) and never repeat."""
    environments, ticks = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    episode, step = np.zeros(environments), np.zeros(environments)
    history = []
    for tick in range(ticks):
        ends = draw(
            st.lists(
                st.sampled_from(["", "", "terminated", "truncated", "both"]),
                min_size=environments,
                max_size=environments,
            )
        )
        terminated = np.array([end in ("terminated", "both") for end in ends])
        truncated = np.array([end in ("truncated", "both") for end in ends])
        observation = np.stack([np.arange(environments), episode, step], 1)
        following = np.stack([np.arange(environments), episode, step + 1], 1)
        reward = np.arange(environments) + 10.0 * tick + 1
        history.append(onefile.Tick(observation, np.full(environments, tick), reward, following, terminated, truncated))
        ended = terminated | truncated
        episode, step = episode + ended, np.where(ended, 0, step + 1)
    return history


def naive_window(window: list[Any], environment: int, gamma: float) -> tuple[float, float, list[float]]:
    """Walk forwards through one environment's ticks until the episode or the window ends."""
    total, discount = 0.0, 1.0
    for tick in window:
        total += discount * tick.reward[environment]
        discount *= gamma
        if tick.terminated[environment]:
            return total, 0.0, list(tick.next_observation[environment])
        if tick.truncated[environment]:
            break
    return total, discount, list(tick.next_observation[environment])


@settings(deadline=None, max_examples=60)
@given(history=histories(), n=st.integers(1, 5), gamma=st.sampled_from([0.5, 0.9, 1.0]))
def test_n_step_windows_equal_a_naive_walk(history: list[Any], n: int, gamma: float) -> None:
    for first in range(len(history) - n + 1):
        window = history[first : first + n]
        observation, action, reward, discount, following = onefile.fold_n_step(window, gamma)
        np.testing.assert_array_equal(observation, window[0].observation)
        np.testing.assert_array_equal(action, window[0].action)
        for environment in range(len(reward)):
            expected = naive_window(window, environment, gamma)
            np.testing.assert_allclose(reward[environment], expected[0], rtol=1e-12)
            np.testing.assert_allclose(discount[environment], expected[1], rtol=1e-12)
            np.testing.assert_array_equal(following[environment], expected[2])


def one_tick(reward: float, value: float, terminated: bool = False, truncated: bool = False) -> Any:
    state = np.array([[value]])
    return onefile.Tick(
        state, np.zeros(1, int), np.array([reward]), state + 0.5, np.array([terminated]), np.array([truncated])
    )


def test_trap_truncation_is_not_termination() -> None:
    for terminated, expected in ((True, 0.0), (False, 0.9)):
        window = [one_tick(1.0, 7.0, terminated=terminated, truncated=True)]
        assert onefile.fold_n_step(window, 0.9)[3].item() == pytest.approx(expected)


def test_trap_return_crossing_an_episode_and_bootstrap_by_gamma_to_the_first_power() -> None:
    cut = [one_tick(1.0, 0.0), one_tick(2.0, 1.0, truncated=True), one_tick(100.0, 50.0)]
    _, _, reward, discount, following = onefile.fold_n_step(cut, 0.9)
    assert reward.item() == pytest.approx(1.0 + 0.9 * 2.0)
    assert discount.item() == pytest.approx(0.9**2)
    assert following.item() == 1.5  # what the last action led to, not the next episode's 50
    whole = [one_tick(1.0, 0.0), one_tick(2.0, 1.0), one_tick(3.0, 2.0)]
    assert onefile.fold_n_step(whole, 0.9)[3].item() == pytest.approx(0.9**3)


# ---------------------------------------------------------------------------------------------------------- the ring


@settings(deadline=None, max_examples=50)
@given(capacity=st.integers(4, 20), groups=st.lists(st.integers(1, 4), min_size=1, max_size=20))
def test_trap_ring_seam_never_mixes_two_transitions(capacity: int, groups: list[int]) -> None:
    replay = onefile.Replay(capacity, observation_size=2)
    written = 0
    for count in groups:
        serial = np.arange(written, written + count, dtype=np.float64)
        pair = np.stack([serial, serial], 1)
        replay.add((pair, serial, serial + 0.25, serial + 0.5, pair + 0.75))
        written += count
    kept = set(range(max(0, written - capacity), written))
    assert replay.size == len(kept)
    batch = replay.sample(400, np.random.default_rng(0))
    assert set(batch.action.tolist()) == kept
    serial = batch.action.float()
    for column, offset in ((batch.reward, 0.25), (batch.discount, 0.5)):
        torch.testing.assert_close(column, serial + offset)
    torch.testing.assert_close(batch.observation, serial[:, None].expand(-1, 2))
    torch.testing.assert_close(batch.next_observation, serial[:, None].expand(-1, 2) + 0.75)


class Counting(gym.Env[np.ndarray, int]):
    """Observes (episode, step); every episode is cut after 4 steps, or ends after 3 if its number is odd."""

    observation_space = gym.spaces.Box(0, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.episode, self.count = -1, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.episode, self.count = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._observe(), 1.0, self.count == 3 and self.episode % 2 == 1, self.count == 4, {}

    def _observe(self) -> np.ndarray:
        return np.array([self.episode, self.count], np.float32)


gym.register("QfleetCounting-v0", Counting)


def test_trap_next_observation_taken_across_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[list[np.ndarray]] = []
    add = onefile.Replay.add

    def record(replay: Any, transitions: Any) -> None:
        stored.append([np.array(column) for column in transitions])
        add(replay, transitions)

    monkeypatch.setattr(onefile.Replay, "add", record)
    monkeypatch.setattr(onefile, "evaluate", lambda *_, **__: 0.0)
    flags = (
        "--env QfleetCounting-v0 --envs 2 --n-step 3 --gamma 0.5 --reward-scale 1 --env-steps 60 --evaluate-every 1000"
    )
    onefile.train(arguments(*flags.split(), "--observation-scale", "1", "1", "--learning-starts", "60"))
    assert len(stored) == 60 // 2 - 2
    starts = set()
    for transitions in stored:
        for (episode, step), _, reward, discount, (next_episode, next_step) in zip(*transitions, strict=True):
            length = 3 if episode % 2 else 4
            k = min(3, length - step)
            assert (next_episode, next_step) == (episode, step + k)
            assert reward == pytest.approx(sum(0.5**i for i in range(int(k))))
            assert discount == (0.0 if episode % 2 and step + k == 3 else 0.5**k)
            starts.add((episode, step))
    complete = {(e, s) for e in range(7) for s in range(3 if e % 2 else 4)}
    assert complete <= starts  # the tails of episodes are there too


# ------------------------------------------------------------------------------------------------------------- acting


def test_trap_one_epsilon_coin_for_all_environments() -> None:
    network = onefile.QNetwork(1, 50, 8, [1.0])
    rng = np.random.default_rng(0)
    observation = np.zeros((200, 1), np.float32)
    greedy = onefile.choose_actions(network, observation, 0.0, rng)
    assert len(set(greedy)) == 1
    differing = np.mean(onefile.choose_actions(network, observation, 0.5, rng) != greedy)
    assert 0.35 < differing < 0.63  # some explore and some do not, within one tick


def test_trap_epsilon_schedule_that_never_moves() -> None:
    values = [onefile.linear_epsilon(step, 1.0, 0.1, 100) for step in (0, 50, 100, 10_000)]
    assert values == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_trap_more_environments_change_updates_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onefile, "evaluate", lambda *_, **__: 0.0)
    flags = ("--env-steps", "480", "--learning-starts", "240", "--batch-size", "4", "--hidden", "8")
    counts = [onefile.train(arguments(*flags, "--envs", str(envs)))["updates"] for envs in (1, 4, 16)]
    assert counts == [60, 60, 60]


# ----------------------------------------------------------------------------------------------------------- learning


def constant(values: list[float]) -> torch.nn.Module:
    """A network whose action values are the same everywhere."""
    layer = torch.nn.Linear(1, len(values))
    torch.nn.init.zeros_(layer.weight)
    layer.bias.data = torch.tensor(values)
    return layer


def batch_of(reward: list[float], discount: list[float]) -> Any:
    size = len(reward)
    zeros = torch.zeros(size, 1)
    return onefile.Batch(
        zeros, torch.zeros(size, dtype=torch.int64), torch.tensor(reward), torch.tensor(discount), zeros
    )


def test_trap_double_that_is_not() -> None:
    online, target = constant([5.0, 1.0]), constant([2.0, 3.0])
    batch = batch_of([1.0, 1.0], [0.5, 0.0])
    assert onefile.td_target(online, target, batch, double=True).tolist() == [2.0, 1.0]
    assert onefile.td_target(online, target, batch, double=False).tolist() == [2.5, 1.0]


def test_trap_huber_that_drops_the_importance_weights() -> None:
    online, target = constant([0.0, 0.0]), constant([0.0, 0.0])
    batch = batch_of([0.5, 3.0], [0.0, 0.0])
    per_item = [0.5 * 0.5**2, 3.0 - 0.5]
    assert onefile.td_loss(online, target, batch).item() == pytest.approx(sum(per_item) / 2)
    weighted = onefile.td_loss(online, target, batch, weight=torch.tensor([0.2, 1.0]))
    assert weighted.item() == pytest.approx((0.2 * per_item[0] + per_item[1]) / 2)


def test_target_updates_are_hard_or_soft() -> None:
    online, target = constant([4.0, 8.0]), constant([0.0, 0.0])
    onefile.update_target(online, target, 0.25)
    assert target.bias.tolist() == [1.0, 2.0]
    onefile.update_target(online, target, 1.0)
    assert target.bias.tolist() == [4.0, 8.0]
    assert online.bias.tolist() == [4.0, 8.0]


def test_the_same_seed_gives_the_same_run() -> None:
    flags = ("--env-steps", "500", "--seed", "5")
    runs = [onefile.train(arguments(*flags)) for _ in range(2)]
    for name in ("env_steps", "updates", "final_mean"):
        assert runs[0][name] == runs[1][name]


def test_learns_cartpole() -> None:
    result = onefile.train(arguments("--seed", "3"))
    assert result["solved"]
    assert result["final_mean"] >= 475
