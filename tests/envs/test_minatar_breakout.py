"""Breakout equals the `minatar` package's, tick by tick, through lost balls, cleared walls and refills."""

from __future__ import annotations

import numpy as np
import pytest
from minatar_oracle import check_conduct, compare, mixed, random_actions
from numpy.typing import NDArray

from qfleet.envs.tensor.minatar.breakout import Breakout
from qfleet.envs.tensor.minatar.common import LEFT, NOOP, RIGHT

SITES = {"reset": (1,)}
BRICKS = 30


def keep_ball(planes: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
    """Go where a falling ball will reach row 8, or now and then the column after, where it turns back."""
    cell = planes[:, :3].reshape(len(planes), 3, -1).argmax(2)
    (y, x), (trail_y, trail_x), paddle = np.divmod(cell[:, 1], 10), np.divmod(cell[:, 2], 10), cell[:, 0] % 10
    rightwards = np.where(x == trail_x, x == 0, x > trail_x)
    fall = np.where((y > trail_y) | (y < 8), 8 - y, 0) + (rng.random(len(x)) < 0.1)
    unfolded = (np.where(rightwards, x, 19 - x) + fall) % 20
    return _towards(paddle, np.minimum(unfolded, 19 - unfolded))


def _towards(paddle: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(target < paddle, LEFT, np.where(target > paddle, RIGHT, NOOP))


def test_equals_the_package_on_random_actions() -> None:
    play = compare(Breakout(all_actions=True), SITES, random_actions, ticks=500)
    assert len(play.lengths) > 1000


def test_equals_the_package_through_refilled_walls() -> None:
    play = compare(Breakout(all_actions=True), SITES, mixed(keep_ball, 0.02), ticks=1600)
    assert max(play.returns) > 2 * BRICKS
    assert len(play.lengths) > 100


@pytest.mark.parametrize("sticky", [0.0, 0.5])
def test_equals_the_package_with_other_sticky_actions(sticky: float) -> None:
    play = compare(Breakout(all_actions=True, sticky=sticky, ramping=False), SITES, mixed(keep_ball, 0.05), ticks=300)
    assert max(play.returns) > 10


def test_conduct() -> None:
    check_conduct(Breakout(all_actions=True))
