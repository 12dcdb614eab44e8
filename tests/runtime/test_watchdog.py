"""When a role is taken for dead, and when a run is said to stand still."""

from __future__ import annotations

import dataclasses

from qfleet.core.protocols import Report
from qfleet.roles.actor import IN_ENVS, MAKING
from qfleet.runtime.streams import Level
from qfleet.runtime.watchdog import Standstill, Watchdog


def report(phase: str = "running", step_s: float = 0.0, idle: str = "") -> Report:
    return Report("actor", 0, phase, {}, 0.0, {}, idle, step_s)


def test_step_may_last_as_long_as_its_phase_allows() -> None:
    dog = Watchdog(stall=60)
    assert dog.verdict("a", report(step_s=59), True, 0) == ""
    assert "61 s in one step, in phase 'running'" in dog.verdict("a", report(step_s=61), True, 0)
    assert dog.verdict("a", report("compiling", step_s=599), True, 0) == ""
    assert "compiling" in dog.verdict("a", report("compiling", step_s=601), True, 0)
    assert dog.verdict("a", report(step_s=599), False, 0) == "", "a death that would end the run is not rushed"


def test_who_allows_longer_steps_allows_longer_phases_and_silences_too_and_is_told_where() -> None:
    dog = Watchdog(stall=600)
    assert dog.verdict("a", report(step_s=599), True, 0) == ""
    assert dog.verdict("a", report(step_s=601), True, 0).endswith("in phase 'running' (survival.stall_s 600)")
    assert dog.verdict("a", report("evaluating", step_s=5999), True, 0) == ""
    assert dog.verdict("a", report("evaluating", step_s=6001), True, 0).endswith("'evaluating' (survival.stall_s 600)")
    dog.heard("a", 0)
    assert dog.verdict("a", report(), True, 39, pausing=True) == "", "its environment may keep Python to itself"
    assert "silent for 41 s" in dog.verdict("a", report(), True, 41, pausing=True)
    assert dog.verdict("a", report(), True, 601).endswith("in phase 'running' (survival.stall_s 600)")


def test_silence_counts_only_while_somebody_listens() -> None:
    dog = Watchdog(stall=60)
    dog.heard("a", 0)
    for second in range(61):
        dog.listening(second)
    assert dog.verdict("a", report(), True, 60) == ""
    assert "silent for 61 s" in dog.verdict("a", report(), True, 61)
    dog.listening(200)  # the supervisor itself was away for more than two minutes
    assert dog.verdict("a", report(), True, 200) == ""


def test_whoever_allows_steps_of_moments_does_not_kill_those_whom_nobody_heard() -> None:
    """A callback of three seconds was the end of all roles where a step might take two."""
    dog = Watchdog(stall=0.1)
    dog.listening(10)
    dog.heard("a", 10)
    for now in (13, 13.1, 14):
        dog.listening(now)
        assert dog.verdict("a", report(), True, now) == ""
    dog.listening(15)
    dog.listening(15.5)
    assert "silent for 2 s" in dog.verdict("a", report(), True, 15.5)


def test_nobody_waits_long_for_a_silent_process_while_all_pause() -> None:
    dog = Watchdog(stall=60)
    dog.heard("a", 0)
    assert dog.verdict("a", report(), True, 3, pausing=True) == ""
    assert "silent for 5 s" in dog.verdict("a", report(), True, 5, pausing=True)
    assert dog.verdict("a", report(), False, 5, pausing=True) == "", "its death would end the run"
    assert dog.verdict("a", report("starting"), True, 5, pausing=True) == "", "imports give no sign of life"
    assert dog.verdict("a", report(), True, 5) == ""


def test_nobody_waits_long_for_a_step_when_a_person_waits_for_the_end() -> None:
    dog = Watchdog(stall=60)
    assert dog.verdict("a", report(step_s=50), True, 0) == ""
    assert dog.verdict("a", report(step_s=50), True, 0, hurried_s=2) == "", "it may come back by itself"
    assert dog.verdict("a", report(step_s=2), True, 0, hurried_s=9) == "", "its step has only begun"
    for phase in ("running", IN_ENVS, "evaluating", MAKING):
        said = dog.verdict("a", report(phase, step_s=50), True, 0, hurried_s=4)
        assert said == f"it held up the end of the run: 50 s in one step, in phase '{phase}'"
    assert dog.verdict("a", report("save", step_s=50), True, 0, hurried_s=4) == "", "what it writes is waited for"
    assert dog.verdict("a", report(step_s=50), False, 0, hurried_s=4) == "", "its death would end the run"


def test_standstill_is_told_once_and_again_after_a_movement() -> None:
    still, waiting, level = Standstill(), report(idle="room"), Level("experience-0", 5, 2, 3)

    def told(now: float, seen: Report = waiting, sent: int = 5) -> bool:
        return bool(still.look([seen], [dataclasses.replace(level, sent=sent)], now))

    assert not told(0)
    assert not told(9.9)
    assert told(10.1)
    assert not told(30)
    assert not told(31, sent=6)
    assert not told(40.5, sent=6)
    assert told(41.5, sent=6)
    assert not told(60, report(idle="room", step_s=3), sent=6), "it works"
    assert not told(69, sent=6)
    assert not told(100, report(), sent=6)
    assert still.look([], [], 200) == "", "when all are done nobody waits"


def test_standstill_names_those_who_are_there_and_counts_the_others_of_many() -> None:
    facing = {
        "learner-0": {"batches-0": ["replay-0"], "batches-1": ["replay-1"]},
        "replay-1": {"experience": [f"actor-{index}" for index in range(9)], "batches-1": ["learner-0"]},
    }
    learner = Report("learner", 0, "running", {}, 0.0, {}, "no batch", awaited=("batches-0", "batches-1"))
    replay = Report("replay", 1, "running", {}, 0.0, {}, "no new experience", awaited=("experience",))
    actors = [Report("actor", index, "running", {}, 0.0, {}, "rests") for index in (1, 2, 4, 5, 7)]
    still = Standstill(facing)
    assert still.look([learner, replay, *actors], [], 0, ["replay-0"]) == ""
    told = still.look([learner, replay, *actors], [], 20, ["replay-0"])
    assert "learner-0 waits for replay-0 (done), replay-1: no batch;" in told
    assert "replay-1 waits for actor-1, actor-2, actor-4, actor-5 and 1 more: no new experience;" in told
    assert "actor-1 waits: rests;" in told
