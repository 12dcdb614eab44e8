"""Roles that die or hang in real processes and live again: nothing lost, nothing left, one error in the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_process_placement import HERE, alive, assert_nothing_left, own_folders, run_to_failure, wait_until
from toy_roles import Handles, KeptProducer, Relay, Settings, kept_pipeline, save

from qfleet.core.errors import ConfigError, RoleFailure
from qfleet.core.protocols import Incident
from qfleet.core.types import Notice
from qfleet.runtime import children, reviving, watchdog
from qfleet.runtime.graph import Graph
from qfleet.runtime.processes import ProcessPlacement
from qfleet.runtime.restarts import Restarts


def run_to_end(placement: ProcessPlacement) -> dict[str, dict[str, float]]:
    """Return the last metrics of every role; nothing may be left of the run."""
    try:
        wait_until(lambda: bool(placement.advance() or placement.done), "the run ends")
        return {report.kind: report.metrics for report in placement.reports()}
    finally:
        pids = list(placement.pids().values())
        placement.close()
        assert_nothing_left(pids)


POINTS = [
    "kept_producer-0/channel.before_send:kill@7",
    "kept_producer-0/channel.after_write:kill@7",
    "kept_producer-0/channel.after_send:kill@7",
    "kept_consumer-0/channel.before_ack:kill@7",
    "kept_consumer-0/keep.before_commit:exit@7",
    "kept_consumer-0/keep.after_commit:kill@7",
    "worker.step:kill@7",
]


@pytest.mark.parametrize("point", POINTS)
def test_death_at_any_point_loses_no_message(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLEET_FAIL", point)
    placement = ProcessPlacement(kept_pipeline(60))
    metrics = run_to_end(placement)
    assert metrics["kept_consumer"]["position"] == 60
    assert metrics["kept_producer"]["position"] == 60
    doubled = "after_send" in point or "after_commit" in point or "before_ack" in point
    assert (metrics["kept_consumer"]["again"] > 0) == doubled, "came again exactly where it was not acknowledged"
    incidents = placement.incidents()
    dead = {"kept_producer", "kept_consumer"} if "/" not in point else {point.split("-")[0]}
    assert {incident.role for incident in incidents if isinstance(incident, Incident)} == dead
    for incident in incidents:
        assert isinstance(incident, Incident)
        assert (incident.index, incident.life) == (0, 1)
        assert ("SIGKILL" if "kill" in point else "code 70") in incident.cause
        assert 0 <= incident.seconds_to_repair < 10
    assert placement.incidents() == [], "told once"


def test_role_that_hangs_is_killed_and_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLEET_FAIL", "kept_consumer-0/worker.step:hang@5")
    placement = ProcessPlacement(kept_pipeline(60), stall=2.0)
    assert run_to_end(placement)["kept_consumer"]["position"] == 60
    (incident,) = placement.incidents()
    assert isinstance(incident, Incident)
    assert re.match(r"it hung: [2-9] s in one step, in phase 'running'", incident.cause)


def test_process_that_is_stopped_is_taken_for_dead() -> None:
    placement = ProcessPlacement(kept_pipeline(200, pace_s=0.01), stall=2.5)
    wait_until(lambda: (placement.advance() or placement.reports()[0].phase) == "running", "it runs")
    os.kill(placement.pids()["kept_producer-0"], signal.SIGSTOP)
    assert run_to_end(placement)["kept_consumer"]["position"] == 200
    (incident,) = placement.incidents()
    assert isinstance(incident, Incident)
    assert "silent for" in incident.cause


@pytest.mark.parametrize("fault", ["build", "children"])
def test_death_while_it_is_built_or_with_processes_of_its_own(fault: str) -> None:
    placement = ProcessPlacement(kept_pipeline(100, pace_s=0.01, producer_fault=fault))
    if fault == "children":
        wait_until(lambda: bool(placement.advance() or placement.reports()[0].metrics.get("helper0")), "it has a child")
        os.kill(placement.pids()["kept_producer-0"], signal.SIGKILL)
    metrics = run_to_end(placement)["kept_producer"]
    assert metrics["life"] == 1
    if fault == "children":
        helpers = [int(metrics[f"helper{life}"]) for life in (0, 1)]
        assert helpers[1] > 0
        wait_until(lambda: not any(alive(pid) for pid in helpers), "what a dead role had started is gone with it")


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("segfault", r"its process was killed by SIGSEGV .*; it was at .*toy_roles\.py\", line \d+ in __init__"),
        ("exit", "its process exited with code 9 .*"),
    ],
)
def test_role_that_cannot_be_built_ends_the_run_after_a_second_try(fault: str, cause: str) -> None:
    began = time.monotonic()
    with pytest.raises(RoleFailure) as caught:
        ProcessPlacement(kept_pipeline(10, producer_fault=fault))
    assert time.monotonic() - began < 5, "it does not wait between the tries"
    assert (caught.value.role, caught.value.index) == ("kept_producer", 0)
    assert re.match(cause, caught.value.cause)
    assert "while it was being built" in caught.value.cause
    assert caught.value.cause.endswith("; that was the second try")
    assert own_folders(os.getpid()) == []


def test_crash_says_where_it_happened() -> None:
    placement = ProcessPlacement(kept_pipeline(100, pace_s=0.01))
    wait_until(lambda: (placement.advance() or placement.reports()[0].phase) == "running", "it runs")
    os.kill(placement.pids()["kept_producer-0"], signal.SIGSEGV)
    run_to_end(placement)
    (incident,) = placement.incidents()
    assert isinstance(incident, Incident)
    assert re.match(r"its process was killed by SIGSEGV; it was at .*, line \d+ in \w+", incident.cause)


def test_role_that_was_done_says_so_again() -> None:
    placement = ProcessPlacement(kept_pipeline(10))
    wait_until(lambda: bool(placement.advance() or placement.done), "done")
    os.kill(placement.pids()["kept_consumer-0"], signal.SIGKILL)
    wait_until(lambda: not (placement.advance() or placement.done), "its death is seen")
    assert run_to_end(placement)["kept_consumer"] == {
        **placement.reports()[1].metrics,
        "position": 10.0,
        "life": 1,
        "again": 0,
    }


def test_too_many_deaths_are_one_error_that_names_role_and_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLEET_FAIL", "kept_consumer-0/worker.step:exit@1:always")
    placement = ProcessPlacement(kept_pipeline(60), restarts=2)
    failure = run_to_failure(placement)
    assert (failure.role, failure.index) == ("kept_consumer", 0)
    deaths = "that was death 3 in a row after little or no work (survival.restarts 2)"
    assert failure.cause == f"its process exited with code 70; {deaths}"
    assert own_folders(os.getpid()) == []


def test_role_that_raises_is_not_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLEET_FAIL", "kept_consumer-0/worker.step:raise@3")
    assert "failpoint worker.step" in run_to_failure(ProcessPlacement(kept_pipeline(60))).cause


@pytest.mark.parametrize(("fault", "lives"), [("environment", 1), ("environment in life 1, being built", 2)])
def test_a_role_whose_environment_breaks_is_begun_anew(fault: str, lives: int) -> None:
    placement = ProcessPlacement(kept_pipeline(60, consumer_fault=fault))
    metrics = run_to_end(placement)["kept_consumer"]
    assert (metrics["position"], metrics["life"]) == (60, lives)
    causes = [one.cause for one in placement.incidents() if isinstance(one, Incident)]
    assert causes == ["the robot fell over", "the robot cannot stand up"][:lives]


def test_a_role_that_cannot_be_built_for_its_environment_ends_the_run_at_once() -> None:
    with pytest.raises(RoleFailure) as caught:
        ProcessPlacement(kept_pipeline(10, consumer_fault="environment in life 0, being built"))
    assert caught.value.cause == "the robot cannot stand up."


def test_the_last_fault_of_an_environment_says_what_would_have_helped() -> None:
    failure = run_to_failure(ProcessPlacement(kept_pipeline(60, consumer_fault="environment"), restarts=0))
    deaths = "that was death 1 in a row after little or no work (survival.restarts 0)"
    assert failure.cause == f"the robot fell over; {deaths}"


def test_a_group_lives_and_dies_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second member dies: both are begun anew, and only the one that died of itself is said to have."""
    monkeypatch.setenv("QFLEET_FAIL", "kept_producer-1/worker.step:kill@3")
    graph = kept_pipeline(60, pace_s=0.01)
    outlet, _ = graph.stream("other", 1000)
    graph.add(KeptProducer, Settings(count=60), Handles(outlet=outlet, keep=graph.keep("second")))
    placement = ProcessPlacement(graph, groups=("kept_producer",))
    assert run_to_end(placement)["kept_consumer"]["position"] == 60
    causes = {(one.role, one.index): one.cause for one in placement.incidents() if isinstance(one, Incident)}
    assert causes == {
        ("kept_producer", 0): "kept_producer-1 of its group died",
        ("kept_producer", 1): "its process was killed by SIGKILL",
    }


def test_too_many_deaths_of_a_group_count_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLEET_FAIL", "kept_producer-1/worker.step:kill@3:always")
    graph = kept_pipeline(1000, pace_s=0.01)
    outlet, _ = graph.stream("other", 1000)
    graph.add(KeptProducer, Settings(count=1000), Handles(outlet=outlet, keep=graph.keep("second")))
    placement = ProcessPlacement(graph, groups=("kept_producer",), restarts=2)

    def advance() -> None:
        while True:
            placement.advance()
            assert len(set(placement._due.values())) <= 1, "who is begun earlier would keep the others from it for ever"

    with pytest.raises(RoleFailure) as caught:
        advance()
    failure = caught.value
    assert (failure.role, failure.index) == ("kept_producer", 1)
    assert "that was death 3 in a row after little or no work" in failure.cause


@pytest.mark.parametrize("fault", ["save", "restore"])
def test_death_in_the_middle_of_a_checkpoint_does_not_spoil_it(fault: str, tmp_path: Path) -> None:
    graph = kept_pipeline(100, pace_s=0.005, consumer_fault=fault)
    placement = ProcessPlacement(graph)
    wait_until(lambda: bool(placement.advance() or placement.reports()[1].metrics.get("position", 0) > 10), "some work")
    save(placement, tmp_path)
    placement.close()
    assert len(placement.incidents()) == (fault == "save")
    again = ProcessPlacement(graph)
    again.restore(tmp_path)
    metrics = run_to_end(again)["kept_consumer"]
    assert (metrics["position"], metrics["again"]) == (100, 0)


def test_deaths_before_the_pause_are_no_obstacle_to_it(tmp_path: Path) -> None:
    placement = ProcessPlacement(kept_pipeline(400, pace_s=0.002))
    for number, name in enumerate(("kept_producer-0", "kept_consumer-0", "kept_producer-0")):
        placement.advance()
        os.kill(placement.pids()[name], signal.SIGKILL)
        (tmp_path / str(number)).mkdir()
        save(placement, tmp_path / str(number))
        assert (tmp_path / str(number) / "kept_producer-0.msgpack").exists()
    assert run_to_end(placement)["kept_consumer"]["position"] == 400


SCRIPT = """
    import sys
    sys.path.insert(0, {here!r})
    from toy_roles import kept_pipeline
    from qfleet.runtime.processes import ProcessPlacement
    placement = ProcessPlacement(kept_pipeline(100_000, pace_s=0.01, producer_fault="children"))
    pid = 0
    while not pid:
        placement.advance()
        pid = int(placement.reports()[0].metrics.get("helper0", 0))
    print(*placement.pids().values(), pid, flush=True)
    while True:
        placement.advance()
"""


def test_killed_supervisor_takes_what_its_roles_have_started_along(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT.format(here=str(HERE))))
    process = subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    process.kill()
    process.communicate()
    wait_until(lambda: not any(alive(pid) for pid in pids), "roles and their children notice")


def test_standstill_names_who_waits_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_STANDSTILL_S", 0.5)
    graph = Graph()
    outlet, inlet = graph.stream("full", 2)
    graph.add(KeptProducer, Settings(count=10), Handles(outlet=outlet, keep=graph.keep("producer")))
    placement = ProcessPlacement(graph)
    notices: list[Any] = []
    wait_until(lambda: bool(placement.advance() or notices.extend(placement.incidents()) or notices), "it is told")
    assert isinstance(notices[0], Notice)
    assert notices[0].kind == "standstill"
    assert "kept_producer-0 waits: room; full holds 2 of 2" in notices[0].text
    receiver = placement.open(inlet)
    wait_until(lambda: bool(placement.advance() or receiver.receive() or placement.done), "it goes on")
    placement.close()


def test_standstill_names_who_is_at_the_other_end_of_what_each_role_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_STANDSTILL_S", 0.5)
    graph = Graph()
    there, back = graph.stream("there", 2), graph.stream("back", 2)
    unread, _ = graph.stream("unread", 1)  # nobody waits on it
    graph.add(Relay, Settings(), Handles(inlet=back[1], outlet=there[0], publisher=graph.publisher("news")))
    graph.add(Relay, Settings(), Handles(inlet=there[1], outlet=back[0], subscriber=graph.subscriber("news")))
    graph.add(KeptProducer, Settings(count=10), Handles(outlet=unread, keep=graph.keep("producer")))
    placement = ProcessPlacement(graph)
    notices: list[Any] = []
    wait_until(lambda: bool(placement.advance() or notices.extend(placement.incidents()) or notices), "it is told")
    placement.close()
    told = notices[0].text
    assert "relay-0 waits for relay-1: input; relay-1 waits for relay-0: input; kept_producer-0 waits: room; " in told
    assert "unread holds 1 of 1" in told


def test_bad_failpoint_is_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLEET_FAIL", "worker.step:explode@1")
    with pytest.raises(ConfigError, match=r"QFLEET_FAIL: 'worker.step:explode@1' is not"):
        ProcessPlacement(kept_pipeline(1))
    assert own_folders(os.getpid()) == []


def test_deaths_after_short_lives_are_begun_anew_later_and_later_and_others_at_once() -> None:
    restarts = Restarts(4, quick_s=10.0)
    assert [restarts.delay("a", lived) for lived in (300.0, 0.0, 9.0, 1.0, 2.0, 3.0)] == [0, 0, 1, 2, 4, None]
    assert [restarts.delay("b", lived) for lived in (0.0, 1.0, 11.0, 1.0, 11.0, 11.0)] == [0, 1, 0, 0, 0, 0]


def test_who_allows_no_death_after_a_short_life_allows_those_after_work() -> None:
    restarts = Restarts(0, quick_s=10.0)
    assert [restarts.delay("a", lived) for lived in (3600.0, 11.0, 9.0)] == [0, 0, None]


def test_nobody_is_begun_anew_later_than_after_a_minute() -> None:
    restarts = Restarts(10_000, quick_s=10.0)
    delays = [restarts.delay("a", 0.0) for _ in range(10_000)]
    assert delays[6:10] == [32, 60, 60, 60]
    assert delays[-1] == 60


def test_a_role_that_works_between_its_deaths_may_die_as_often_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths that each follow after a while of work are not those of a role that cannot live."""
    monkeypatch.setattr(reviving, "_QUICK_S", 0.05)
    monkeypatch.setenv("QFLEET_FAIL", "kept_consumer-0/worker.step:kill@20:always")
    placement = ProcessPlacement(kept_pipeline(100, pace_s=0.01), restarts=1)
    assert run_to_end(placement)["kept_consumer"]["position"] == 100
    assert len([one for one in placement.incidents() if isinstance(one, Incident)]) > 2


def test_a_role_whose_long_lives_come_to_nothing_is_not_begun_anew_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever always ended it later than ten seconds after its birth had it begun anew without an end."""
    monkeypatch.setattr(reviving, "_QUICK_S", 1e-9)
    monkeypatch.setenv("QFLEET_FAIL", "kept_consumer-0/worker.step:kill@1:always")
    failure = run_to_failure(ProcessPlacement(kept_pipeline(60), restarts=2))
    assert (failure.role, failure.index) == ("kept_consumer", 0)
    assert "that was death 3 in a row after little or no work (survival.restarts 2)" in failure.cause


def test_who_was_idle_is_not_to_blame_for_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviving, "_QUICK_S", 1e-9)
    placement = ProcessPlacement(kept_pipeline(600, pace_s=1.0), restarts=0)  # killed between two messages

    def idles(life: int) -> bool:
        placement.advance()
        consumer = placement.reports()[1]
        return bool(consumer.idle) and consumer.metrics["life"] == life

    for life in range(3):
        wait_until(lambda life=life: idles(life), "it waits for a message")  # type: ignore[misc]
        os.kill(placement.pids()["kept_consumer-0"], signal.SIGKILL)
    wait_until(lambda: idles(3), "it was begun anew each time")
    pids = list(placement.pids().values())
    placement.close()
    assert_nothing_left(pids)


def test_a_role_that_is_stopped_before_its_first_report_does_not_hold_up_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was taken for one that is still being built, for which everybody waits ten minutes."""
    monkeypatch.setenv("QFLEET_FAIL", "kept_consumer-0/worker.step:stop@1")
    placement = ProcessPlacement(kept_pipeline(20))
    consumer = psutil.Process(placement.pids()["kept_consumer-0"])
    placement.advance()
    wait_until(lambda: consumer.status() == psutil.STATUS_STOPPED, "it takes its first step")
    placement.pause()
    assert run_to_end(placement)["kept_consumer"]["position"] == 20
    (incident,) = [one for one in placement.incidents() if isinstance(one, Incident)]
    assert "while the others waited for it" in incident.cause


@pytest.mark.parametrize("stopped", ["before a death", "after a death", "before the end"])
def test_a_forkserver_that_somebody_stops_holds_up_neither_deaths_nor_births_nor_the_end(stopped: str) -> None:
    """Nobody else tells of deaths: the run went on without its role for good, and its end took ten seconds."""
    placement = ProcessPlacement(kept_pipeline(600, pace_s=0.001))
    placement.advance()
    producer = psutil.Process(placement.pids()["kept_producer-0"])
    forkserver = producer.parent()
    assert forkserver is not None
    dead = producer if stopped == "after a death" else None
    if dead is not None:
        dead.kill()
        wait_until(lambda: not alive(dead.pid), "it is dead")
    forkserver.suspend()
    wait_until(lambda: forkserver.status() == psutil.STATUS_STOPPED, "the forkserver has stopped")
    if stopped == "before a death":
        producer.kill()
    if stopped != "before the end":
        assert run_to_end(placement)["kept_consumer"]["position"] == 600
        return
    placement.close()
    assert forkserver.status() != psutil.STATUS_STOPPED
    assert_nothing_left([producer.pid])


def test_a_forkserver_that_is_stopped_while_it_is_asked_for_a_child_answers_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waited for its answer was the only one who would have let it go on."""
    ensure, stopped = children._ensure_forkserver, []

    def stop() -> None:
        ensure()
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    monkeypatch.setattr(children, "_ensure_forkserver", stop)
    placement = ProcessPlacement(kept_pipeline(20))
    assert run_to_end(placement)["kept_consumer"]["position"] == 20
    assert stopped


def test_roles_report_also_where_there_is_always_another_command() -> None:
    """With a checkpoint twice a second they stood there as if they had nothing to do."""
    placement = ProcessPlacement(kept_pipeline(10**6, pace_s=0.001))

    def reported() -> bool:
        placement.advance()
        placement.pause()
        return all(report.metrics.get("position") for report in placement.reports())

    try:
        wait_until(reported, "all have reported")
    finally:
        placement.close()


@pytest.mark.parametrize("hurried", [False, True])
def test_a_role_that_took_long_to_be_built_is_not_in_a_long_step_when_it_is_ready(hurried: bool) -> None:
    """It was killed before it could report: no such run ever began, and one SIGTERM meanwhile lost the run."""
    stall = 600.0 if hurried else 2.0
    placement = ProcessPlacement(
        kept_pipeline(20, pace_s=0.01, producer_fault="slow build"), stall=stall, brief=("kept_producer",)
    )
    if hurried:
        placement.hurry()
    assert run_to_end(placement)["kept_consumer"]["position"] == 20
    assert not placement.incidents()
