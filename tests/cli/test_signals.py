"""Real signals to real runs, at awkward moments: they end soon, have saved what there was, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import hanging_env
import pytest
from started_runs import LOADED_S, PROCESSES, Flags, Started, lives, started, training

from qfleet.runtime import checkpoint
from qfleet.runtime.ownership import INTERRUPTED, look

WORKERS = {"env.vectorisation": "async", "actor.envs": "4"}
EVALUATING = {"evaluation.every": "500", "evaluation.episodes": "10000"}
SAVING = {"checkpoint.every": "1"}


def saving(run: Path) -> bool:
    return any((run / "checkpoints").glob(".epoch-*/[0-9]*")) and len(checkpoint.complete(run / "checkpoints")) > 0


CASES = {
    "training": (PROCESSES, training, 0.0),
    "starting": (PROCESSES, started, 0.5),
    "workers": (WORKERS, training, 0.0),
}
MORE = {
    "inline": ({}, training, 0.0),
    "evaluating": (PROCESSES | EVALUATING, training, 2.0),
    "evaluating-inline": (EVALUATING, training, 2.0),
    "saving": (PROCESSES | SAVING, saving, 0.0),
    "saving-inline": (SAVING, saving, 0.0),
    "workers-processes": (PROCESSES | WORKERS, training, 0.0),
    **{f"starting-{tenths}": (PROCESSES, started, tenths / 10) for tenths in (0, 1, 2, 4, 8, 12, 20)},
    **{f"starting-workers-{tenths}": (PROCESSES | WORKERS, started, tenths / 10) for tenths in (3, 10)},
}


NUMBERS = {"ctrl-c": signal.SIGINT, "sigterm": signal.SIGTERM}
ORDINARY = ("training ctrl-c", "starting sigterm")


@pytest.mark.parametrize(
    ("flags", "moment", "seconds", "number"),
    [
        pytest.param(*case, number, id=name, marks=() if name in ORDINARY else pytest.mark.slow)
        for what, case in {**CASES, **MORE}.items()
        for signal_name, number in NUMBERS.items()
        for name in [f"{what} {signal_name}"]
    ],
)
def test_a_signal_ends_a_run_soon_and_cleanly(
    flags: Flags,
    moment: Callable[[Path], bool],
    seconds: float,
    number: signal.Signals,
    tmp_path: Path,
) -> None:
    run = Started(tmp_path / "run", flags)
    try:
        run.wait_for(moment, seconds)
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)  # as a terminal does
        else:
            run.process.send_signal(number)
        assert run.end() == 130, run.errors()
        if training(run.run):
            assert checkpoint.newest_good(run.run / "checkpoints").manifest["env_steps"] > 0
    finally:
        run.clean_up()


@pytest.mark.parametrize("policy", [None, "ACTIVE"])
def test_threads_of_roles_do_not_spin_for_long_unless_they_are_told_to(policy: str | None, tmp_path: Path) -> None:
    """Two runs with two threads each on two cores made 2 updates a second, where one makes 60."""
    run = Started(tmp_path / "run", PROCESSES, more={"OMP_WAIT_POLICY": policy} if policy else {})
    try:
        run.wait_for(training)
        (learner,) = [process for process in run.family.values() if lives(process) and process.name() == "learner-0"]
        given = learner.environ()
        assert (given.get("OMP_WAIT_POLICY"), given.get("GOMP_SPINCOUNT")) == (policy, None if policy else "1000")
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 130, run.errors()
    finally:
        run.clean_up()


def test_sigterm_ends_a_run_on_ray_cleanly(tmp_path: Path) -> None:
    """Ray has a handler of its own, by which the run failed and saved nothing."""
    pytest.importorskip("ray")
    run = Started(tmp_path / "run", {"placement": "ray", "actors": "1"})
    try:
        run.wait_for(training, 1.0)
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(LOADED_S)  # Ray itself takes a while
        assert run.end() == 130, run.errors()
        assert checkpoint.newest_good(run.run / "checkpoints").manifest["env_steps"] > 0
    finally:
        run.clean_up()


def test_who_presses_ctrl_c_again_and_again_gets_the_same_exit_code(tmp_path: Path) -> None:
    """The interpreter was killed by the last one while libraries were ending."""
    run = Started(tmp_path / "run", PROCESSES)
    try:
        run.wait_for(training)
        while run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGINT)
            time.sleep(0.04)
        assert run.end() == 130, run.errors()
    finally:
        run.clean_up()


def test_a_terminal_that_is_closed_while_a_run_is_planned_is_an_interrupt(tmp_path: Path) -> None:
    flags = {"placement": "processes"}
    run = Started(tmp_path / "run", flags, more={"XDG_CACHE_HOME": str(tmp_path / "empty")})
    try:
        run.wait_for(lambda path: look(path).alive)
        run.process.send_signal(signal.SIGHUP)
        run.process.wait(LOADED_S)
        assert run.end() == 130, run.errors()
        assert look(run.run).owner.ending == INTERRUPTED
    finally:
        run.clean_up()


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, id="sigterm"), pytest.param(signal.SIGHUP, id="sighup", marks=pytest.mark.slow)],
)
def test_a_run_ends_cleanly_when_all_its_processes_are_asked_to(number: signal.Signals, tmp_path: Path) -> None:
    """As `timeout` and service managers do it, or a terminal that is closed: no role may die of it."""
    run = Started(tmp_path / "run", PROCESSES)
    try:
        run.wait_for(training, 1.0)
        for process in filter(lives, run.family.values()):
            process.send_signal(number)
        os.killpg(run.process.pid, number)
        assert run.end() == 130, run.errors()
        assert checkpoint.newest_good(run.run / "checkpoints").manifest["env_steps"] > 0
        assert '"event": "restart"' not in (run.run / "events.jsonl").read_text()
    finally:
        run.clean_up()


@pytest.mark.parametrize(
    "kind", ["actor-0", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("learner-0", "evaluator-0"))]
)
def test_a_role_that_is_stopped_does_not_hold_up_the_end(kind: str, tmp_path: Path) -> None:
    run = Started(tmp_path / "run", PROCESSES)
    try:
        run.wait_for(training, 1.0)
        (victim,) = [process for process in run.family.values() if lives(process) and process.name() == kind]
        victim.suspend()
        time.sleep(0.5)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 130, run.errors()
        assert checkpoint.newest_good(run.run / "checkpoints").manifest["env_steps"] > 0
        assert "silent" in (run.run / "events.jsonl").read_text()
    finally:
        run.clean_up()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "flags", "number"),
    [
        pytest.param("evaluator-0", {}, signal.SIGTERM, id="evaluator"),
        pytest.param("evaluator-0", {}, signal.SIGINT, id="evaluator-ctrl-c"),
        pytest.param("evaluator-0", {"lockstep": "True"}, signal.SIGTERM, id="lockstep"),
        pytest.param("actor-0", {}, signal.SIGTERM, id="actor"),
    ],
)
def test_an_environment_that_hangs_does_not_hold_up_the_end(
    role: str, flags: Flags, number: signal.Signals, tmp_path: Path
) -> None:
    note = tmp_path / "hangs"
    more = {hanging_env.ROLE: role, hanging_env.NOTE: str(note), "PYTHONPATH": str(Path(__file__).parent)}
    flags = PROCESSES | EVALUATING | {"actors": "1"} | flags
    run = Started(tmp_path / "run", flags, "gym:hanging_env:Hanging-v0", more)
    try:
        run.wait_for(lambda _: note.exists(), 0.5)
        run.process.send_signal(number)
        assert run.end() == 130, run.errors()
        found = checkpoint.newest_good(run.run / "checkpoints")
        assert found.manifest["env_steps"] > 0
        if role == "evaluator-0":
            assert checkpoint.read_state(found.directory, role)["weights"] is not None, "to be evaluated anew"
    finally:
        run.clean_up()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, PROCESSES], ids=["inline", "processes"])
def test_a_second_signal_ends_a_run_at_once(flags: Flags, tmp_path: Path) -> None:
    run = Started(tmp_path / "run", flags | SAVING)
    try:
        run.wait_for(training)
        os.killpg(run.process.pid, signal.SIGINT)
        time.sleep(0.6)
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGINT)
        assert run.end() in (130, -signal.SIGINT), run.errors()  # the same to a shell: it came after all was done
    finally:
        run.clean_up()
