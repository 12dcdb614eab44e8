"""Rehearsals: over when they say so, and silent about what fails in them."""

from __future__ import annotations

import threading

from qfleet.accel.rehearsal import Rehearsal


def test_its_end_is_waited_for() -> None:
    may_end, done = threading.Event(), []

    def work() -> None:
        may_end.wait(30)
        done.append(True)

    rehearsal = Rehearsal(work)
    assert not done
    may_end.set()
    rehearsal.end()
    assert done == [True]


def test_what_fails_in_it_is_nobodys_business() -> None:
    def work() -> None:
        raise RuntimeError("no compiler")

    Rehearsal(work).end()
