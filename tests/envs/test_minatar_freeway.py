"""Freeway equals the `minatar` package's, tick by tick, through crossings, hits and the end of time."""

from __future__ import annotations

import numpy as np
import pytest
from minatar_oracle import Policy, Row, check_conduct, compare, mixed, random_actions
from numpy.typing import NDArray

from qfleet.envs.tensor.minatar.common import DOWN, UP
from qfleet.envs.tensor.minatar.freeway import Freeway

TICKS = 2501


def paces(row: Row) -> Row:
    """Return the uniform numbers that make the package draw the sizes of the velocities that we take from the row."""
    return ((np.abs(_velocities(row)) - 0.5) / 5).astype(np.float32)


def directions(row: Row) -> Row:
    """Return the same for the signs."""
    return np.where(_velocities(row) < 0, 0.25, 0.75).astype(np.float32)


def _velocities(row: Row) -> NDArray[np.int64]:
    return np.array([-5, -4, -3, -2, -1, 1, 2, 3, 4, 5])[(row[1:] * np.float32(10)).astype(np.int64).clip(max=9)]


SITES = {"_randomize_cars": (paces, directions)}


def hurry(planes: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
    return np.full(len(planes), UP)


def wander(planes: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
    return rng.choice([UP, UP, DOWN], size=len(planes))


def test_equals_the_package_until_time_ends() -> None:
    play = compare(Freeway(all_actions=True), SITES, mixed(hurry, 0.1), envs=32, ticks=TICKS + 700)
    assert play.lengths == [TICKS] * 32
    assert min(play.returns) > 10


@pytest.mark.parametrize("policy", [random_actions, wander])
def test_equals_the_package_when_it_dawdles(policy: Policy) -> None:
    play = compare(Freeway(all_actions=True), SITES, policy, envs=32, ticks=300)
    assert play.oldest == 300


@pytest.mark.parametrize("sticky", [0.0, 0.5])
def test_equals_the_package_with_other_sticky_actions(sticky: float) -> None:
    play = compare(Freeway(all_actions=True, sticky=sticky, ramping=False), SITES, mixed(hurry, 0.3), ticks=200)
    assert play.reward > 50


def test_conduct() -> None:
    check_conduct(Freeway(all_actions=True))
