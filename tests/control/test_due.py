"""When a run is saved, by a clock that does not run by itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.control import due
from qfleet.control.due import RETRY_S, Due
from qfleet.experiment import CheckpointConfig


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(due.time, "perf_counter", lambda: now[0])
    return now


def made(env_steps: int = 0, row_bytes: float = 0.0, capacity: int = 10**6, **config: Any) -> Due:
    return Due(CheckpointConfig(**{"every": 10**9, "every_s": 10**6, **config}), env_steps, row_bytes, capacity)


def test_every_multiple_of_its_steps_also_where_one_was_made_in_between(clock: list[float]) -> None:
    found = made(every=100)
    assert [found.now(steps) for steps in (0, 99, 100)] == [False, False, True]
    found.begin(150)
    assert [found.now(steps) for steps in (199, 200)] == [False, True]


def test_after_some_time_however_few_the_steps(clock: list[float]) -> None:
    found = made(every_s=5.0)
    clock[0] += 4.9
    assert not found.now(1)
    clock[0] += 0.2
    assert found.now(1)
    found.begin(1)
    assert not found.now(2)


def test_before_more_rows_are_new_than_may_be(clock: list[float]) -> None:
    """Seven gigabytes of frames took most of a minute after SIGTERM."""
    found = made(row_bytes=7_000.0, unsaved_mb=512.0)
    assert not found.now(73_000)
    assert found.now(73_200)
    found.begin(73_200)
    assert not found.now(146_000)


def test_a_replay_that_is_no_larger_is_saved_as_seldom_as_was_asked(clock: list[float]) -> None:
    assert not made(row_bytes=7_000.0, capacity=73_000).now(10**8)
    assert not made(row_bytes=0.0).now(10**8)


def test_what_could_not_be_written_is_tried_again_soon_and_not_at_every_look(clock: list[float]) -> None:
    found = made(row_bytes=7_000.0)
    found.begin(0)
    assert [found.fail(), found.fail()] == [True, False]
    assert not found.now(10**8), "a full disk is not filled by trying"
    clock[0] += RETRY_S
    assert found.now(10**8)
    found.begin(10**8)
    assert found.succeed() == RETRY_S
    assert found.succeed() is None
    assert found.now(2 * 10**8)


def test_what_was_lost_is_taken_anew_at_once(clock: list[float]) -> None:
    found = made()
    found.begin(10)
    found.lose()
    assert found.now(10)
    found.begin(10)
    assert not found.now(11)


@given(st.integers(1, 500), st.floats(1.0, 1e5), st.integers(1, 10**5), st.lists(st.integers(0, 300), max_size=60))
def test_never_more_is_new_than_may_be_and_what_comes_between_two_looks(
    every: int, row_bytes: float, capacity: int, grows: list[int]
) -> None:
    found, saved = made(0, row_bytes, capacity, every=every, unsaved_mb=1.0), 0
    for steps in itertools.accumulate(grows):
        if found.now(steps):
            found.begin(steps)
            saved = steps
        assert min(steps - saved, capacity) * row_bytes <= 1e6
        assert steps - saved <= every
