"""Asterix equals the `minatar` package's, tick by tick, from empty lanes to the steepest ramp."""

from __future__ import annotations

import numpy as np
import pytest
from minatar_oracle import check_conduct, compare, mixed, random_actions
from numpy.typing import NDArray

from qfleet.envs.tensor.minatar.asterix import Asterix

SITES = {"_spawn_entity": (1, 2, 3)}
STEEPEST = 9 * 102
STEPS = ((0, 0), (0, -1), (-1, 0), (0, 1), (1, 0))


def avoid_enemies(planes: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
    """Step to where the lane's enemy is farthest, rather into a lane with gold, rather towards the middle."""
    games, (y, x) = np.arange(len(planes)), np.divmod(planes[:, 0].reshape(len(planes), -1).argmax(1), 10)
    values = []
    for dy, dx in STEPS:
        row, column = np.clip(y + dy, 1, 8), np.clip(x + dx, 0, 9)
        enemy, gold = planes[games, 1, row], planes[games, 3, row].any(1)
        distance = np.where(enemy, np.abs(np.arange(10) - column[:, None]), 10).min(1)
        values.append(np.minimum(distance, 3) + 0.5 * gold - 0.05 * np.abs(column - 4.5))
    return np.argmax(np.stack(values, 1) + 0.01 * rng.random((len(planes), len(STEPS))), 1)


def test_equals_the_package_on_random_actions() -> None:
    play = compare(Asterix(all_actions=True), SITES, random_actions, ticks=400)
    assert len(play.lengths) > 200


def test_equals_the_package_up_to_the_steepest_ramp() -> None:
    play = compare(Asterix(all_actions=True), SITES, mixed(avoid_enemies, 0.01), ticks=1600)
    assert sum(length > STEEPEST for length in play.lengths) > 5
    assert max(play.returns) > 50


def test_equals_the_package_without_ramping() -> None:
    play = compare(Asterix(all_actions=True, ramping=False), SITES, mixed(avoid_enemies, 0.1), ticks=1000)
    assert play.oldest > STEEPEST


@pytest.mark.parametrize("sticky", [0.0, 0.5])
def test_equals_the_package_with_other_sticky_actions(sticky: float) -> None:
    play = compare(Asterix(all_actions=True, sticky=sticky), SITES, mixed(avoid_enemies, 0.1), ticks=250)
    assert len(play.lengths) > 10


def test_conduct() -> None:
    check_conduct(Asterix(all_actions=True))
