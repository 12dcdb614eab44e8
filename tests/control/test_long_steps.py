"""Roles in one long step are named: until it ends they seem to do nothing."""

from __future__ import annotations

import dataclasses

from qfleet.control.progress import _in_one_step
from qfleet.core.protocols import Report
from qfleet.roles.actor import IN_ENVS, NO_ROOM


def report(index: int, step_s: float, phase: str = "running") -> Report:
    return Report("actor", index, phase, {}, 0.0, {}, step_s=step_s)


def test_who_is_in_a_long_step_is_named_first() -> None:
    """A hung actor was shown as one that has nothing to do, for a minute."""
    assert _in_one_step([report(0, 4.9), report(1, 41.2)]) == "actor.1 is in one step for 41 s; "
    assert _in_one_step([report(0, 900.0, "evaluating")]) == ""
    many = _in_one_step([report(index, 9.0) for index in range(5)])
    assert many.startswith("actor.0 is in one step for 9 s; actor.1")
    assert many.endswith("actor.2 is in one step for 9 s; 2 more are in one step, too; ")


def test_an_environment_of_its_own_process_that_does_not_answer_is_waited_for() -> None:
    """The panel said that what the actor had sent was not used up: the reason of the step before."""
    hung, quick = report(0, 12.0, IN_ENVS), report(1, 0.1, IN_ENVS)
    assert _in_one_step([hung, quick]) == "actor.0 is waiting for environments for 12 s; "
    stale = dataclasses.replace(hung, idle=NO_ROOM)
    assert stale.waits_for == IN_ENVS
    assert dataclasses.replace(report(0, 12.0), idle=NO_ROOM).waits_for == ""
    assert dataclasses.replace(quick, idle=NO_ROOM).waits_for == NO_ROOM
