"""A thread that waits: woken by any that it named, by the alarm, by the end of the time, and by nothing else."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Literal

import pytest

from qfleet.core.waiting import Waiter
from qfleet.runtime.bells import Bell, create_bells

SIDES: tuple[Literal["sender", "receiver"], ...] = ("sender", "receiver")


def bells(stem: Path) -> list[Bell]:
    create_bells(stem)
    return [Bell(stem, side) for side in SIDES]


def test_only_what_is_named_wakes_and_only_the_alarm_is_told_of(tmp_path: Path) -> None:
    alarm, ring = multiprocessing.Pipe(duplex=False)
    waiter, pairs = Waiter(alarm), [bells(tmp_path / name) for name in "ab"]
    pairs[1][1].ring()
    began = time.monotonic()
    assert not waiter.wait([pairs[0][0]], 0.05)
    assert time.monotonic() - began >= 0.05, "the other one rang"
    for named in ([pairs[0][0], pairs[1][0]], [pairs[1][0]], [pairs[1][0]]):
        assert not waiter.wait(named, None)
        pairs[1][1].ring()
    ring.send_bytes(b"!")
    assert waiter.wait([pairs[1][0]], None)
    began = time.monotonic()
    alarm.recv_bytes()
    assert not waiter.wait([pairs[1][0]], 0.05)
    assert time.monotonic() - began >= 0.05, "what rang is silent again"
    ring.send_bytes(b"!")
    assert waiter.wait((), 60.0)
    alarm.recv_bytes()
    assert not waiter.wait((), 0.0)


def test_an_end_whose_peer_is_gone_waits_in_silence_and_hears_the_next_one(tmp_path: Path) -> None:
    alarm, _ring = multiprocessing.Pipe(duplex=False)
    ours, theirs = bells(tmp_path / "edge")
    del theirs
    waiter, began = Waiter(alarm), time.monotonic()
    assert not waiter.wait([ours], 0.05)
    assert time.monotonic() - began >= 0.05, "nothing rang"
    ours.ring()  # nobody is there to hear it, and that is no error
    Bell(tmp_path / "edge", "receiver").ring()
    assert not waiter.wait([ours], None)


@pytest.mark.parametrize("seconds", [-1.0, -1e-9, 0.0, 1e-6])
def test_time_that_is_already_up_is_not_waited_for(seconds: float) -> None:
    alarm, _ring = multiprocessing.Pipe(duplex=False)
    began = time.monotonic()
    assert not Waiter(alarm).wait((), seconds)
    assert time.monotonic() - began < 1.0
