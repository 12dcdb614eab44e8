"""Seaquest equals the `minatar` package's, tick by tick, from an empty sea to an enemy in every tick."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from minatar_oracle import Oracle, check_conduct, compare, mixed, random_actions
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from qfleet.envs.tensor.minatar.common import FIRE, NOOP, UP
from qfleet.envs.tensor.minatar.seaquest import Seaquest

SITES = {"_spawn_enemy": (1, 5, 3), "_spawn_diver": (2, 4)}
FRONT, BACK, SHOT, TRAIL, TORPEDO, FISH, SUB, AIR, ABOARD, DIVER = range(10)
STEPS = np.array([[0, 0], [0, -1], [-1, 0], [0, 1], [1, 0]])
ROW, COLUMN = np.arange(10)[:, None], np.arange(10)


class Captain:
    """Picks up divers and shoots ahead while nothing comes too near; surfaces with two of them, or in every other game
    with six. After six the package forgives surfacing without any, so that one can go up and down: the steepest ramp.
    """

    def __init__(self, envs: int = 64) -> None:
        self.games = np.arange(envs)
        self.aboard, self.forgiven = np.zeros(envs, np.int64), np.zeros(envs, np.bool_)
        self.rescues = self.most_enemies = 0

    def __call__(self, planes: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
        y, x = np.divmod(planes[:, FRONT].reshape(len(planes), -1).argmax(1), 10)
        enemies = planes[:, FISH] | planes[:, SUB]
        self.follow(planes, enemies)
        goal_y, goal_x = self.goal(planes, y, x, rng)
        to_y, to_x = np.clip(y[:, None] + STEPS[:, 0], 0, 8), np.clip(x[:, None] + STEPS[:, 1], 0, 9)
        danger = (near(enemies, 1) | near(planes[:, TORPEDO], 2))[self.games[:, None], to_y, to_x]
        stranded = (to_y == 0) & ((y > 0) & (self.aboard == 0) & ~self.forgiven)[:, None]
        cost = np.abs(to_y - goal_y[:, None]) + np.abs(to_x - goal_x[:, None]) + 100 * danger + 1000 * stranded
        right = (x > 0) & planes[self.games, BACK, y, x - 1]
        ahead = np.where(right[:, None], x[:, None] < COLUMN, x[:, None] > COLUMN) & enemies[self.games, y]
        shoots = ahead.any(1) & ~danger[:, 0] & (rng.random(len(planes)) < 0.5)
        return np.where(shoots, FIRE, (cost + 0.5 * rng.random(cost.shape)).argmin(1))

    def follow(self, planes: NDArray[np.bool_], enemies: NDArray[np.bool_]) -> None:
        aboard, new = planes[:, ABOARD, 9].sum(1), ~(enemies | planes[:, DIVER]).any((1, 2))
        rescued = (self.aboard == 6) & (aboard == 0) & ~new
        self.aboard, self.forgiven = aboard, (self.forgiven | rescued) & ~new
        self.rescues += int(rescued.sum())
        self.most_enemies = max(self.most_enemies, int(enemies.sum((1, 2)).max()))

    def goal(
        self, planes: NDArray[np.bool_], y: NDArray[np.int64], x: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        distance = np.abs(ROW - y[:, None, None]) + np.abs(COLUMN - x[:, None, None])
        nearest = np.where(planes[:, DIVER], distance, 99).reshape(len(planes), -1).argmin(1)
        goal_y, goal_x = np.where(planes[:, DIVER].any((1, 2)), np.divmod(nearest, 10), (y, x))
        low, has = planes[:, AIR, 9].sum(1) < 5, (self.aboard > 0) | self.forgiven
        bobs = self.forgiven & (rng.random(len(planes)) < 0.8)
        up = (self.aboard >= np.where(self.games % 2, 6, 2)) | (low & has) | (bobs & (y > 0))
        return np.where(up, 0, np.where(bobs, 1, goal_y)), np.where(up | bobs, x, goal_x)


def near(cells: NDArray[np.bool_], distance: int) -> NDArray[np.bool_]:
    """Return which cells [E, 10, 10] have one of `cells` in their row at most `distance` away."""
    padded = np.pad(cells, ((0, 0), (0, 0), (distance, distance)))
    return sliding_window_view(padded, 2 * distance + 1, axis=2).any(3)


def test_equals_the_package_on_random_actions() -> None:
    play = compare(Seaquest(all_actions=True), SITES, random_actions, ticks=300)
    assert len(play.lengths) > 200


@pytest.mark.slow
def test_equals_the_package_up_to_the_steepest_ramp() -> None:
    captain = Captain()
    play = compare(Seaquest(all_actions=True), SITES, mixed(captain, 0.02), ticks=1600)
    assert captain.rescues > 20
    assert captain.most_enemies > 15
    assert max(play.lengths) > 600


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_equals_the_package_over_many_steps(seed: int) -> None:
    captain = Captain()
    compare(Seaquest(all_actions=True), SITES, mixed(captain, 0.02 * seed), ticks=3200, seed=seed)
    assert captain.rescues > 20


def test_equals_the_package_without_ramping() -> None:
    captain = Captain()
    compare(Seaquest(all_actions=True, ramping=False), SITES, mixed(captain, 0.02), ticks=600)
    assert captain.rescues > 5


@pytest.mark.parametrize("sticky", [0.0, 0.5])
def test_equals_the_package_with_other_sticky_actions(sticky: float) -> None:
    play = compare(Seaquest(all_actions=True, sticky=sticky), SITES, mixed(Captain(), 0.1), ticks=200)
    assert len(play.lengths) > 10


def test_conduct() -> None:
    check_conduct(Seaquest(all_actions=True))


class Staged:
    """One game of ours and one of the package, from the start but for what a test puts into both."""

    def __init__(self, x: int, y: int) -> None:
        self.game = Seaquest(all_actions=True, sticky=0.0)
        self.row = np.full(self.game.draws, 0.5, np.float32)
        self.state = self.game.start(torch.from_numpy(self.row)[None])
        self.oracle = Oracle(self.game, SITES)
        self.oracle.reset(self.row)
        self.package: Any = self.oracle._package.env
        self.package.sub_x, self.package.sub_y, self.package.surface = x, y, False
        self.swimmers, self.counters = self.state["swimmers"][0], self.state["counters"][0]
        self.swimmers[:2, 0] = torch.tensor([x, y])

    def tick(self, action: int) -> NDArray[np.bool_]:
        """Take the action in both, fail where they differ, and return the planes [10, 10, 10]."""
        after, reward, over = self.game.move(self.state, torch.tensor([action]), torch.from_numpy(self.row)[None])
        assert (reward.item(), over.item()) == self.oracle.act(action, self.row)
        planes = self.game.planes(after)[0].numpy()
        np.testing.assert_array_equal(planes, self.oracle.planes())
        return planes


@pytest.mark.parametrize("newer_right", [False, True])
def test_the_newer_of_two_divers_in_a_cell_takes_the_last_seat(newer_right: bool) -> None:
    staged = Staged(x=2, y=3)
    older, newer = [2, 2, not newer_right, 5], [2, 2, newer_right, 5]
    staged.package.divers, staged.package.diver_count = [older, newer], 5
    staged.swimmers[:, 3:] = torch.tensor([[2, 2], [2, 2], [1, -1] if newer_right else [-1, 1]])
    staged.counters[3] = 5
    planes = staged.tick(UP)
    assert planes[ABOARD, 9].sum() == 6
    assert planes[TRAIL, 2].tolist() == [column == (3 if newer_right else 1) for column in range(10)]


def test_a_submarine_that_meets_a_shot_fires_all_the_same() -> None:
    staged = Staged(x=8, y=4)
    staged.package.e_subs, staged.package.f_bullets = [[3, 4, True, 0, 0]], [[5, 4, False]]
    staged.swimmers[:, 1] = torch.tensor([5, 4, -1])
    boards = staged.state["boards"][0, :, 4]
    boards[1] = boards[2] = 1 << 6 * 3  # born when the clock was 1 modulo 11: ten ticks before 0
    boards[6] = (1 << 60) - 1
    planes = staged.tick(NOOP)
    assert not planes[SUB].any()
    assert planes[TORPEDO, 4].tolist() == [column == 5 for column in range(10)]
