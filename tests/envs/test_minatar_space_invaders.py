"""Space Invaders equals the `minatar` package's, tick by tick, from the first wave to the fastest."""

from __future__ import annotations

import numpy as np
import pytest
from minatar_oracle import check_conduct, compare, mixed, random_actions
from numpy.typing import NDArray

from qfleet.envs.tensor.minatar.common import FIRE, LEFT, RIGHT
from qfleet.envs.tensor.minatar.space_invaders import SpaceInvaders

CANNON, ALIEN, LEFTWARDS, _, SHOT, BOMB = range(6)
WAVE, RAMPING_WAVES = 24, 6
ROW, COLUMN = np.arange(10)[:, None], np.arange(10)


def hunt(planes: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
    """Shoot where an alien will be when the shot is there; move to the nearest such column, out of the way of bombs."""
    games, cannon, aliens = np.arange(len(planes)), planes[:, CANNON, 9].argmax(1), planes[:, ALIEN]
    heading = np.where(planes[:, LEFTWARDS].any((1, 2)), -1, 1)[:, None, None]
    ticks_a_move = aliens.sum((1, 2)).clip(1, 10)[:, None, None]
    then = COLUMN + heading * ((9 - ROW) // ticks_a_move)
    then = np.where(then < 0, -1 - then, np.where(then > 9, 19 - then, then))  # a turn takes one move
    aims = (aliens[..., None] & (then[..., None] == COLUMN)).any((1, 2))
    danger = planes[:, BOMB, 6:].any(1) | aliens[:, 8:].any(1)
    goal = (np.abs(COLUMN - cannon[:, None]) + 20 * ~aims + 50 * danger).argmin(1)
    shoots = (aims & ~danger)[games, cannon] & ~planes[:, SHOT, 5:].any((1, 2))
    return np.where(shoots | (goal == cannon), FIRE, np.where(goal < cannon, LEFT, RIGHT))


def test_equals_the_package_on_random_actions() -> None:
    play = compare(SpaceInvaders(all_actions=True), {}, random_actions, ticks=400)
    assert len(play.lengths) > 200


@pytest.mark.slow
def test_equals_the_package_up_to_the_fastest_wave() -> None:
    play = compare(SpaceInvaders(all_actions=True), {}, mixed(hunt, 0.01), ticks=1600)
    assert max(play.returns) > WAVE * RAMPING_WAVES
    assert sum(score > WAVE for score in play.returns) > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_equals_the_package_over_many_steps(seed: int) -> None:
    play = compare(SpaceInvaders(all_actions=True), {}, mixed(hunt, 0.01 * seed), ticks=3200, seed=seed)
    assert max(play.returns) > WAVE * RAMPING_WAVES


def test_equals_the_package_without_ramping() -> None:
    play = compare(SpaceInvaders(all_actions=True, ramping=False), {}, mixed(hunt, 0.05), ticks=600)
    assert max(play.returns) > WAVE


@pytest.mark.parametrize("sticky", [0.0, 0.5])
def test_equals_the_package_with_other_sticky_actions(sticky: float) -> None:
    play = compare(SpaceInvaders(all_actions=True, sticky=sticky), {}, mixed(hunt, 0.1), ticks=300)
    assert len(play.lengths) > 10


def test_conduct() -> None:
    check_conduct(SpaceInvaders(all_actions=True))
