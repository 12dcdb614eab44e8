"""Plays the `minatar` package beside a game of ours on the same random decisions, and compares every tick."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import minatar
import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.core.spec import PLAIN
from qfleet.envs.tensor.minatar.common import MinAtar
from qfleet.envs.tensor.protocol import GameState, TensorEnv

Row = NDArray[np.float32]
Sites = dict[str, tuple[int | Callable[[Row], Row], ...]]
"""By the name of each of the package's functions that draw: where its first, second, ... call of a tick is answered
from, a column of the row, or a function of the row for a call that asks for several numbers at once."""
Policy = Callable[[NDArray[np.bool_], np.random.Generator], NDArray[np.int64]]
"""Actions [E] for channels [E, C, 10, 10]."""


class ScriptedRandom:
    """Stands in for the package's generators: answers from the row of uniform numbers that our game gets."""

    def __init__(self, sites: Sites) -> None:
        self._sites = {"act": (0,), **sites}  # the package decides on sticky actions in Environment.act

    def begin(self, row: Row) -> None:
        self._row, self._calls = row, Counter[str]()

    def rand(self, *shape: int) -> Any:
        return self._uniform(shape)

    def randint(self, low: int, high: int | None = None, size: int | None = None) -> Any:
        first, end = (0, low) if high is None else (low, high)
        return first + self._below(self._uniform(_shape(size)), end - first)

    def choice(self, options: int | Sequence[Any], size: int | None = None, p: Sequence[float] | None = None) -> Any:
        uniform = self._uniform(_shape(size))
        items = np.arange(options) if isinstance(options, int) else np.asarray(options)
        if p is None:
            return items[self._below(uniform, len(items))]
        return items[np.searchsorted(np.cumsum(p, dtype=np.float32)[:-1], uniform, side="right")]

    def _uniform(self, shape: tuple[int, ...]) -> Any:
        site = sys._getframe(2).f_code.co_name
        source = self._sites[site][self._calls[site]]
        self._calls[site] += 1
        uniform = source(self._row) if callable(source) else self._row[source]
        assert uniform.shape == shape
        return uniform

    @staticmethod
    def _below(uniform: Any, count: int) -> Any:
        return np.minimum(uniform * np.float32(count), count - 1).astype(np.int64)


def _shape(size: int | None) -> tuple[int, ...]:
    return () if size is None else (size,)


@dataclass
class Play:
    """What a comparison went through, so that a test can demand that it went deep."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Of the episodes that ended."""
    reward: float = 0.0
    """The sum over all ticks of all games."""
    oldest: int = 0
    """Most ticks that any episode lasted, ended or not."""


def random_actions(planes: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
    return rng.integers(6, size=len(planes))


def mixed(policy: Policy, epsilon: float) -> Policy:
    """Return a policy that acts at random with probability `epsilon`, else as `policy` does."""

    def act(planes: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
        return np.where(rng.random(len(planes)) < epsilon, random_actions(planes, rng), policy(planes, rng))

    return act


class Oracle:
    """One game of the package, with its random decisions scripted."""

    def __init__(self, game: MinAtar, sites: Sites) -> None:
        name = type(game).__module__.rsplit(".", 1)[-1]
        self._package = minatar.Environment(name, sticky_action_prob=game.sticky, difficulty_ramping=game.ramping)
        self._package.random = self._package.env.random = self._random = ScriptedRandom(sites)

    def reset(self, row: Row) -> None:
        self._random.begin(row)
        self._package.reset()
        self._package.last_action = 0  # the package carries it over from the episode before

    def act(self, action: int, row: Row) -> tuple[float, bool]:
        self._random.begin(row)
        return self._package.act(action)

    def planes(self) -> NDArray[np.bool_]:
        return self._package.state().transpose(2, 0, 1)


def compare(game: MinAtar, sites: Sites, policy: Policy, *, envs: int = 64, ticks: int, seed: int = 0) -> Play:
    """Play `envs` games for `ticks` in both; fail where an observation, a reward or an end differs."""
    rng, env, play = np.random.default_rng(seed), TensorEnv(game), Play()
    oracles = [Oracle(game, sites) for _ in range(envs)]
    rows = rng.random((envs, game.draws), np.float32)
    state = env.reset(torch.from_numpy(rows))
    for oracle, row in zip(oracles, rows, strict=True):
        oracle.reset(row)
    ended, score = np.zeros(envs, np.bool_), np.zeros(envs)
    planes = _compared_planes(env.observe(state)[PLAIN], oracles, 0)
    for tick in range(1, ticks + 1):
        actions, rows = policy(planes, rng), rng.random((envs, game.draws), np.float32)
        state, outcome = env.step(state, torch.from_numpy(actions), torch.from_numpy(rows))
        reward, over = np.zeros(envs, np.float32), np.zeros(envs, np.bool_)
        for index, oracle in enumerate(oracles):
            if ended[index]:
                oracle.reset(rows[index])
            else:
                reward[index], over[index] = oracle.act(int(actions[index]), rows[index])
        np.testing.assert_array_equal(outcome.reward.numpy(), reward, f"reward at tick {tick}")
        np.testing.assert_array_equal(outcome.terminated.numpy(), over, f"end at tick {tick}")
        planes = _compared_planes(env.observe(state)[PLAIN], oracles, tick)
        score = np.where(ended, 0.0, score + reward)
        ages, ended = state["age"].numpy(), over
        play.returns.extend(score[over].tolist())
        play.lengths.extend(ages[over].tolist())
        play.reward, play.oldest = play.reward + float(reward.sum()), max(play.oldest, int(ages.max()))
    return play


def _compared_planes(ours: torch.Tensor, oracles: list[Oracle], tick: int) -> NDArray[np.bool_]:
    theirs = np.stack([oracle.planes() for oracle in oracles])
    assert ours.dtype == torch.bool
    np.testing.assert_array_equal(ours.numpy(), theirs, f"observation (game, channel, row, column) at tick {tick}")
    return theirs


def check_conduct(game: MinAtar) -> None:
    """Fail if a game changes or shares its tensors, changes their types, needs their values, or draws no picture."""
    _check_without_values(game)
    env, generator = TensorEnv(game), torch.Generator().manual_seed(0)
    torch._dynamo.reset()
    compiled = torch.compile(env.step, backend="eager", fullgraph=True)
    state = env.reset(torch.rand(8, game.draws, generator=generator))
    assert len({value.data_ptr() for value in state.values()}) == len(state)
    for _ in range(60):
        before = {name: value.clone() for name, value in state.items()}
        actions, rows = torch.randint(6, (8,), generator=generator), torch.rand(8, game.draws, generator=generator)
        following, _ = env.step(state, actions, rows)
        _assert_same(before, state)
        _assert_same(following, compiled(state, actions, rows)[0])
        state = following
    picture = game.draw(state, 3)
    assert (picture.shape, picture.dtype) == ((160, 160, 3), np.uint8)
    shown = env.observe(state)[PLAIN][3].any(0)
    np.testing.assert_array_equal(picture[::16, ::16].any(2), shown)


def _check_without_values(game: MinAtar) -> None:
    env, rows = TensorEnv(game), torch.empty(8, game.draws, device="meta")
    state = env.reset(rows)
    following, _ = env.step(state, torch.empty(8, dtype=torch.int64, device="meta"), rows)
    assert {name: (value.dtype, value.shape) for name, value in following.items()} == {
        name: (value.dtype, value.shape) for name, value in state.items()
    }
    assert env.observe(following)[PLAIN].shape == (8, *game.spec.observations[PLAIN].shape)


def _assert_same(one: GameState, other: GameState) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=0)
