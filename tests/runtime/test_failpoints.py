"""Failpoints: the syntax, whom they are meant for, and when they act."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from qfleet.core.errors import ConfigError
from qfleet.core.failpoints import Failpoint, arm, failpoint, parse


@pytest.fixture(autouse=True)
def nothing_armed() -> Iterator[None]:
    yield
    arm("", "test")


def test_syntax() -> None:
    assert parse("") == []
    assert parse("replay.before_commit:kill@3, actor-0/worker.step:hang@12:always") == [
        Failpoint("", "replay.before_commit", "kill", 3, False),
        Failpoint("actor-0", "worker.step", "hang", 12, True),
    ]


@pytest.mark.parametrize(
    "text",
    ["worker.step", "worker.step:kill", "worker.step:kill@0", "a:shoot@1", "a:kill@1:often", "a b:kill@1", "/a:kill@1"],
)
def test_bad_syntax_is_one_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"QFLEET_FAIL: '.*' is not \[ROLE/\]NAME:ACTION@COUNT"):
        parse(f"worker.step:kill@1,{text}")


def acts(text: str, role: str, life: int = 0, everyone: bool = True) -> list[int]:
    """Return at which of five passings something happens."""
    arm(text, role, life, everyone)
    found = []
    for number in range(1, 6):
        try:
            failpoint("place")
            failpoint("another")
        except RuntimeError:
            found.append(number)
    return found


def test_acts_at_its_count_in_the_life_and_role_it_is_meant_for() -> None:
    assert acts("place:raise@2", "actor-0") == [2]
    assert acts("place:raise@2,place:raise@4", "actor-0") == [2, 4]
    assert acts("actor-0/place:raise@2", "actor-0") == [2]
    assert acts("actor-1/place:raise@2", "actor-0") == []
    assert acts("place:raise@2", "actor-0", life=1) == []
    assert acts("place:raise@2:always", "actor-0", life=1) == [2]
    assert acts("place:raise@2,supervisor/place:raise@3", "supervisor", everyone=False) == [3]
    assert acts("elsewhere:raise@1", "actor-0") == []


def test_a_slow_place_takes_its_time_and_goes_on() -> None:
    began = time.monotonic()
    assert acts("place:slow@2", "actor-0") == []
    assert 0.5 <= time.monotonic() - began < 5
