"""What only real processes can get wrong: deaths, leftovers, blocked roles, Ctrl-C, the user's main module."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_roles import (
    Blocked,
    Consumer,
    Faulty,
    Handles,
    Leader,
    Painter,
    Producer,
    Rank,
    Settings,
    Stuck,
    Viewer,
    pipeline,
    save,
)

from qfleet.core.errors import ConfigError, QfleetError, RoleFailure
from qfleet.runtime import reviving
from qfleet.runtime.graph import Graph
from qfleet.runtime.memory import RunFolder, remove_leftovers, shared_memory_root
from qfleet.runtime.processes import ProcessPlacement

HERE = Path(__file__).parent


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not in time: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def own_folders(pid: int) -> list[Path]:
    return list(shared_memory_root().glob(f"*qfleet-{pid}-*"))


def assert_nothing_left(pids: list[int]) -> None:
    wait_until(lambda: not any(alive(pid) for pid in pids), "all children are gone")
    assert own_folders(os.getpid()) == []


def run_to_failure(placement: ProcessPlacement) -> RoleFailure:
    def run() -> None:
        while True:
            placement.advance()

    with pytest.raises(RoleFailure) as caught:
        run()
    return caught.value


def test_trap_19_nothing_is_left_after_a_clean_end() -> None:
    placement = ProcessPlacement(pipeline(10))
    if sys.platform == "linux":
        assert {psutil.Process(pid).name() for pid in placement.pids().values()} == set(placement.pids())
    pids = list(placement.pids().values())
    assert len(own_folders(os.getpid())) == 1
    placement.close()
    placement.close()
    assert_nothing_left(pids)


@pytest.mark.parametrize("victim", ["producer-0", "relay-0", "consumer-0"])
def test_trap_19_killed_child_is_named_and_nothing_is_left(victim: str) -> None:
    placement = ProcessPlacement(pipeline(100_000, size=2_000))
    pids = placement.pids()
    for _ in range(3):
        placement.advance()
    os.kill(pids[victim], signal.SIGKILL)
    failure = run_to_failure(placement)
    assert f"{failure.role}-{failure.index}" == victim, "the dead role, not a peer that lost it"
    assert "SIGKILL" in failure.cause
    assert_nothing_left(list(pids.values()))


def test_child_that_exits_is_named_with_its_code() -> None:
    graph = Graph()
    graph.add(Faulty, Settings(fault="exit", fault_at=2), Handles())
    assert "code 7" in run_to_failure(ProcessPlacement(graph)).cause


def test_failure_brings_the_traceback_of_the_child() -> None:
    graph = Graph()
    graph.add(Faulty, Settings(fault="raise", fault_at=2), Handles())
    failure = run_to_failure(ProcessPlacement(graph))
    assert 'raise ValueError("boom")' in "".join(failure.__notes__)


def test_settings_that_a_role_refuses_are_told_before_who_found_them() -> None:
    graph = Graph()
    graph.add(Faulty, Settings(fault="settings"), Handles())
    with pytest.raises(ConfigError, match=r"^tensor 3 does not divide 64 \(found by faulty-0\)"):
        ProcessPlacement(graph)


def test_blocked_role_reports_its_phase_and_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviving, "STOP_S", 0.2)
    graph = Graph()
    graph.add(Blocked, Settings(), Handles())
    placement = ProcessPlacement(graph)
    pids = list(placement.pids().values())
    wait_until(lambda: (placement.advance() or placement.reports()[0].phase) == "thinking", "the heartbeat shows it")
    placement.close()
    assert_nothing_left(pids)


def test_the_processor_time_of_what_a_role_has_begun_is_reported_with_its_own() -> None:
    """Environments in processes of their own took no time, so that their cores were thought to be free."""
    graph = Graph()
    graph.add(Leader, Settings(), Handles())
    placement = ProcessPlacement(graph)
    try:
        wait_until(lambda: (placement.advance() or placement.reports()[0].cpu_s) > 1234.0, "the heartbeat shows it")
        assert placement.reports()[0].cpu_s < 1334.0
    finally:
        placement.close()


def test_children_ignore_ctrl_c() -> None:
    placement = ProcessPlacement(pipeline(300, pace_s=0.001))
    try:
        placement.advance()
        for pid in placement.pids().values():
            os.kill(pid, signal.SIGINT)
        wait_until(lambda: bool(placement.advance() or placement.done), "they finish their work")
    finally:
        placement.close()


def test_saving_does_not_hang_on_roles_that_are_in_a_collective(tmp_path: Path) -> None:
    graph = Graph()
    for rank in range(2):
        graph.add(Rank, Settings(rank=rank, ranks=2, rendezvous=f"file://{tmp_path}/meet"), Handles())
    placement = ProcessPlacement(graph)
    try:
        for number in range(10):
            directory = tmp_path / str(number)
            directory.mkdir()
            placement.advance()
            save(placement, directory)
            assert (directory / "rank-1.msgpack").exists()
    finally:
        placement.close()


def test_killed_rank_is_named_although_its_peers_fail_first(tmp_path: Path) -> None:
    graph = Graph()
    for rank in range(2):
        graph.add(Rank, Settings(rank=rank, ranks=2, rendezvous=f"file://{tmp_path}/meet"), Handles())
    placement = ProcessPlacement(graph)
    wait_until(lambda: bool(placement.advance() or placement.reports()[1].metrics.get("position")), "ranks work")
    os.kill(placement.pids()["rank-1"], signal.SIGKILL)
    failure = run_to_failure(placement)
    assert (failure.role, failure.index) == ("rank", 1)


def test_each_role_gets_the_threads_it_was_given() -> None:
    placement = ProcessPlacement(pipeline(10), threads={"relay": 2})
    try:
        wait_until(lambda: bool(placement.advance() or placement.done), "done")
        assert {r.kind: r.metrics["threads"] for r in placement.reports()} == {"producer": 1, "relay": 2, "consumer": 1}
    finally:
        placement.close()


def test_class_of_the_main_module_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Homemade(Consumer):
        kind = "homemade"

    monkeypatch.setattr(sys.modules["__main__"], "Homemade", Homemade, raising=False)
    Homemade.__module__, Homemade.__qualname__ = "__main__", "Homemade"
    graph = Graph()
    graph.add(Homemade, Settings(), Handles())
    with pytest.raises(ConfigError, match=r"homemade-0 .*--placement inline or move the class to a module"):
        ProcessPlacement(graph)
    assert own_folders(os.getpid()) == []


def test_capacity_of_none_is_refused_and_a_large_one_works() -> None:
    with pytest.raises(ConfigError, match="stream 'first': a capacity of 0"):
        ProcessPlacement(pipeline(1, capacity=0))
    assert own_folders(os.getpid()) == []
    placement = ProcessPlacement(pipeline(1500, capacity=1000))
    try:
        wait_until(lambda: bool(placement.advance() or placement.done), "all messages come through")
    finally:
        placement.close()


SCRIPT = """
    import sys, time
    sys.path.insert(0, {here!r})
    print("main module runs", flush=True)
    from toy_roles import pipeline
    from qfleet.runtime.processes import ProcessPlacement
    placement = ProcessPlacement(pipeline({count}, pace_s={pace_s}))
    print(*placement.pids().values(), flush=True)
    while not placement.done:
        placement.advance()
    print([r.metrics["position"] for r in placement.reports()], flush=True)
"""


def script(tmp_path: Path, count: int, pace_s: float) -> subprocess.Popen[str]:
    path = tmp_path / "user_script.py"
    path.write_text(textwrap.dedent(SCRIPT.format(here=str(HERE), count=count, pace_s=pace_s)))
    return subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_script_without_main_guard_that_forgets_to_close(tmp_path: Path) -> None:
    process = script(tmp_path, 20, 0.0)
    out, err = process.communicate(timeout=60)
    lines = out.splitlines()
    assert (lines[0], lines[2]) == ("main module runs", "[20.0, 20.0, 20.0]"), out + err
    assert out.count("main module runs") == 1
    assert err == ""
    assert own_folders(process.pid) == []


def test_trap_19_killed_supervisor_takes_its_children_along_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    process = script(tmp_path, 100_000, 0.01)
    assert process.stdout is not None
    process.stdout.readline()
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    process.kill()
    process.communicate()
    wait_until(lambda: not any(alive(pid) for pid in pids), "the children notice")
    assert len(own_folders(process.pid)) == 1, "nobody was left to clean up"
    RunFolder().remove()
    assert own_folders(process.pid) == []


def test_trap_19_process_that_was_stopped_when_its_supervisor_was_killed_ends_with_the_next_start(
    tmp_path: Path,
) -> None:
    process = script(tmp_path, 100_000, 0.01)
    assert process.stdout is not None
    process.stdout.readline()
    pids = [int(pid) for pid in process.stdout.readline().split()]
    stopped = pids.pop(1)
    os.kill(stopped, signal.SIGSTOP)
    try:
        process.kill()
        process.wait()  # not for its output, which the stopped one holds open
        wait_until(lambda: not any(alive(pid) for pid in pids), "the others notice")
        assert alive(stopped), "it cannot notice anything"
        RunFolder().remove()
        wait_until(lambda: not alive(stopped), "the next start ended it")
        assert own_folders(process.pid) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
        process.communicate()


def test_leftovers_are_told_by_the_owners_lock_not_by_the_process_number(tmp_path: Path) -> None:
    kept = RunFolder(tmp_path)
    reused = tmp_path / f"qfleet-{os.getpid()}-00000000"  # a dead run's number that a living process has now
    reused.mkdir()
    (reused / "owner").touch()
    foreign = tmp_path / "qfleet-notes"
    foreign.mkdir()
    assert remove_leftovers(tmp_path) == [reused]
    assert kept.path.exists()
    assert foreign.exists()
    kept.remove()


def test_nothing_that_uses_the_folder_of_a_living_run_is_killed() -> None:
    placement = ProcessPlacement(pipeline(1000, pace_s=0.001))
    try:
        placement.advance()
        RunFolder().remove()
        wait_until(lambda: bool(placement.advance() or placement.done), "it ends as if nothing had been")
    finally:
        placement.close()


def test_full_shared_memory_is_an_error_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qfleet.runtime import memory

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory.os, "posix_fallocate", full)
    with pytest.raises(QfleetError, match=r"shared memory is too small: a file takes 1\.0 MB"):
        memory.create(tmp_path / "slot", 1 << 20)
    assert not (tmp_path / "slot").exists()


def test_many_values_published_without_pause_are_read_whole() -> None:
    graph = Graph()
    settings = Settings(count=400, size=100_000)
    graph.add(Painter, settings, Handles(publisher=graph.publisher("picture")))
    graph.add(Viewer, settings, Handles(subscriber=graph.subscriber("picture")))
    placement: Any = ProcessPlacement(graph)
    try:
        wait_until(lambda: bool(placement.advance() or placement.done), "the last value is seen")
    finally:
        placement.close()


def test_stream_to_a_role_that_ended_does_not_end_the_sender() -> None:
    graph = Graph()
    outlet, inlet = graph.stream("only", 2)
    graph.add(Producer, Settings(count=2), Handles(outlet=outlet))
    receiver: Any = inlet
    placement = ProcessPlacement(graph)
    try:
        wait_until(lambda: bool(placement.advance() or placement.done), "two messages fit")
        handle = placement.open(receiver)
        assert [handle.receive() is not None for _ in range(3)] == [True, True, False]
        assert handle.exhausted()
    finally:
        placement.close()


def test_only_steps_that_cost_little_are_cut_short_when_a_person_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner's step may take long, and what it learned since its last snapshot would be lost."""
    waited: dict[str, float] = {}

    def verdict(name: str, report: Any, replaceable: bool, now: float, pausing: bool, hurried_s: float) -> str:
        waited[name] = hurried_s
        return ""

    placement = ProcessPlacement(pipeline(10), brief=("producer",))
    monkeypatch.setattr(placement._watchdog, "verdict", verdict)
    placement._watch()
    assert not any(waited.values())
    placement.hurry()
    time.sleep(0.01)
    placement._watch()
    assert {name for name, seconds in waited.items() if seconds > 0} == {"producer-0"}
    placement.close()


def test_background_processes_leave_the_cores_to_others() -> None:
    placement = ProcessPlacement(pipeline(10), background=("producer",))
    nice = {name: psutil.Process(pid).nice() for name, pid in placement.pids().items()}
    placement.close()
    assert nice["producer-0"] > nice["relay-0"] == nice["consumer-0"]


def test_reports_say_how_many_messages_wait_and_what_a_process_has_computed() -> None:
    graph = Graph()
    outlet, inlet = graph.stream("numbers", 3)
    graph.add(Producer, Settings(count=10), Handles(outlet=outlet))
    graph.add(Stuck, Settings(), Handles(inlet=inlet))
    placement = ProcessPlacement(graph)
    try:
        until = time.monotonic() + 30.0
        while (found := {one.kind: one for one in placement.reports()})["stuck"].queue != 3:
            assert time.monotonic() < until, found
            placement.advance()
        assert found["producer"].queue is None, "nothing is ever sent to it"
        while not all(one.cpu_s > 0 for one in placement.reports()):
            assert time.monotonic() < until
            placement.advance()
    finally:
        placement.close()
    assert {one.queue for one in placement.reports()} == {None}, "its memory is gone"
