"""`status`, `stop` and `logs`: real runs are watched, stopped and killed, and what is said of them is true."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, command, environment, start_words
from started_runs import LOADED_S, PROCESSES, Started, lives, started, training

from qfleet.operating import standing
from qfleet.runtime import checkpoint
from qfleet.runtime.ownership import look


def follow(run: Path) -> subprocess.Popen[str]:
    words = start_words(["logs", str(run), "-f"])
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def status(capsys: pytest.CaptureFixture[str], run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command(capsys, "status", str(run), "--json").out)
    return found


def test_a_run_is_watched_survives_a_kill_and_is_stopped_from_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Started(tmp_path / "run", PROCESSES)
    followers = []
    try:
        run.wait_for(training, 1.0)
        followers.append(follow(run.run))
        (victim,) = [process for process in run.family.values() if lives(process) and process.name() == "actor-0"]
        victim.kill()
        run.wait_for(lambda path: standing(path).restarts == 1)
        run.wait_for(lambda path: (standing(path).env_steps_per_s or 0.0) > 0.0)
        seen = status(capsys, run.run)
        assert (seen["state"], seen["owner"]["pid"]) == ("running", run.process.pid)
        assert (seen["preset"], seen["placement"]) == ("gym:CartPole-v1", "processes")
        assert seen["env_steps"] > 0
        assert seen["env_steps_per_s"] >= 0.0, "none in a tenth of a second, perhaps, while somebody is begun"
        assert (seen["actors"], seen["learners"], seen["shards"]) == (2, 1, 1)

        for words in (["resume", str(run.run)], ["train", "cartpole", "--run-dir", str(run.run)]):
            second = command(capsys, *words)
            assert second.code == 2
            assert f"(process {run.process.pid}, since 20" in second.err
            assert f"qfleet stop {run.run}" in second.err

        done = command(capsys, "stop", str(run.run))
        assert (done.code, done.err) == (0, "")
        assert f"go on with: qfleet resume {run.run}" in done.out
        assert run.end() == 130
        saved = checkpoint.newest_good(run.run / "checkpoints").manifest["env_steps"]
        after = status(capsys, run.run)
        assert (after["state"], after["checkpoint"]["env_steps"], after["restarts"]) == ("stopped", saved, 1)

        out, err = followers[0].communicate(timeout=60)
        assert (followers[0].returncode, err) == (0, "")
        lines = out.splitlines()
        assert lines == command(capsys, "logs", str(run.run)).out.splitlines(), "nothing twice, nothing left out"
        assert " started " in lines[0]
        assert [line for line in lines if " actor[0] " in line and " restart " in line]
        assert " stopped " in lines[-1]
        assert f"by {seen['owner']['user']}@" in lines[-1]

        again = command(capsys, "stop", str(run.run))
        assert again.code == 0
        assert "had stopped already" in again.out
    finally:
        run.clean_up()
        for one in followers:
            one.kill()
            one.communicate()


def test_a_suspended_run_is_named_and_one_that_was_killed_is_dead_and_can_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qfleet.cli.stop.WAIT_S", 0.5)
    run = Started(tmp_path / "run", {"checkpoint.every": "2000"})
    try:
        run.wait_for(lambda path: bool(checkpoint.complete(path / "checkpoints")))
        follower = follow(run.run)
        assert follower.stdout is not None
        assert " started " in follower.stdout.readline()
        run.process.send_signal(signal.SIGSTOP)
        os.utime(run.run / ".lock", (time.time() - 300,) * 2)
        unheard = command(capsys, "stop", str(run.run))
        assert (unheard.code, "suspended or hangs" in unheard.err) == (3, True)
        assert f"process {run.process.pid}" in unheard.err
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        _, err = follower.communicate(timeout=60)
        assert (follower.returncode, err.startswith("the run is dead")) == (0, True)
        assert status(capsys, run.run)["state"] == "dead"
        refused = command(capsys, "stop", str(run.run))
        assert refused.code == 2
        assert "is not running. It died (" in refused.err
        assert f"qfleet resume {run.run}" in refused.err
        steps = int(checkpoint.complete(run.run / "checkpoints")[-1].name.partition("-")[0])
        assert command(capsys, "resume", str(run.run), "--env-steps", str(steps + 500), "--quiet").code == 0
        assert status(capsys, run.run)["state"] == "finished"
        over = command(capsys, "stop", str(run.run))
        assert (over.code, "It finished at" in over.err) == (2, True)
    finally:
        run.clean_up()


def test_a_run_that_is_still_being_built_is_stopped_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Started(tmp_path / "run", PROCESSES)
    try:
        run.wait_for(started)
        assert command(capsys, "stop", str(run.run)).code == 0
        run.process.wait(LOADED_S)  # the run has ended; a process takes longer to end that has just loaded everything
        assert run.end() == 130, run.errors()
        assert status(capsys, run.run)["state"] == "stopped"
    finally:
        run.clean_up()


def test_a_run_that_plans_is_seen_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Started(tmp_path / "run", {"placement": "processes"}, more={"XDG_CACHE_HOME": str(tmp_path / "empty")})
    try:
        run.wait_for(lambda path: look(path).alive)
        run.process.send_signal(signal.SIGSTOP)  # planning takes seconds, which may be few
        seen = command(capsys, "status", str(run.run)).out
        assert seen.startswith(f"{run.run}: running, it plans, and has no settings yet\n  owner "), seen
        assert str(run.run) in command(capsys, "status", str(tmp_path)).out
        early = command(capsys, "scale", str(run.run), "--actors", "2")
        assert (early.code, "it still plans, ask again when it trains" in early.err) == (2, True)
        threading.Timer(0.5, run.process.send_signal, [signal.SIGCONT]).start()  # it has been asked to end by then
        done = command(capsys, "stop", str(run.run))
        assert (done.code, done.out) == (0, "It stopped (interrupted before training began); nothing was saved\n")
        run.process.wait(LOADED_S)
        assert run.end() == 130, run.errors()
        assert status(capsys, tmp_path) == []
        again = command(capsys, "train", "maze", "--env-steps", "512", "--quiet", "--run-dir", str(run.run))
        assert again.code == 0, "nothing stands in the way of another try"
    finally:
        run.clean_up()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, two seeds, and a folder that holds neither."""
    from qfleet.cli.main import main

    top = tmp_path_factory.mktemp("folder")
    for words in (["--run-dir", str(top / "one")], ["--run-dir", str(top / "several"), "--seeds", "2"]):
        assert main(["train", "maze", "--env-steps", "512", "--quiet", *words]) == 0
    (top / "other").mkdir()
    return top


def test_a_folder_of_runs_is_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, _, *rows = command(capsys, "status", str(folder)).out.splitlines()
    assert header.split()[:6] == ["run", "state", "since", "owner", "preset", "placement"]
    names = [str(folder / name) for name in ("one", "several/seed-0", "several/seed-1")]
    assert [row.split()[:2] for row in rows] == [[name, "finished"] for name in names]
    listed = json.loads(command(capsys, "status", str(folder), "--json").out)
    assert [(one["run"], one["env_steps"], one["seed"]) for one in listed] == [
        (names[0], 512, 0),
        (names[1], 512, 0),
        (names[2], 512, 1),
    ]
    one = command(capsys, "status", names[0]).out
    assert one.startswith(f"{names[0]}: finished, budget\n")
    assert "maze (tabular, seed 0)" in one


def test_a_status_says_who_is_there_and_how_old_its_numbers_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps are those of the last record, which a reader took for those that a resume goes on from."""
    run, now = tmp_path / "run", time.time()
    run.mkdir()
    (run / "config.yaml").write_text("preset: maze\n")
    record = {"time": now - 90, "env_steps": 700, "updates": 5, "actors": 3, "learners": 2, "shards": 1}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    saved = {"time": now - 30, "event": "checkpoint", "env_steps": 900, "path": "900-1"}
    (run / "events.jsonl").write_text(json.dumps(saved) + "\n")
    shown = command(capsys, "status", str(run)).out
    assert "700, 5 updates (last record, 1m30s ago)" in shown
    assert "at 900 steps, 30s ago" in shown
    assert "3 actors, 2 learners, 1 shard at the last record" in shown
    table = command(capsys, "status", str(tmp_path)).out.splitlines()
    assert "at 900 steps, 30s ago" in table[2]
    found = status(capsys, run)
    assert [found[name] for name in ("env_steps", "actors", "learners", "shards")] == [700, 3, 2, 1]
    assert (found["newest_record"], found["checkpoint"]["env_steps"]) == (record["time"], 900)


def test_a_damaged_run_does_not_hide_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = folder / "one" / "events.jsonl"
    whole = events.read_bytes()
    events.write_bytes(b"{torn\n" + whole)
    try:
        found = command(capsys, "status", str(folder))
        assert (found.code, len(found.out.splitlines())) == (0, 5)
        assert "line 1 is damaged" in found.out.splitlines()[-1]
        listed = json.loads(command(capsys, "status", str(folder), "--json").out)
        assert "line 1 is damaged" in listed[-1]["error"]
        assert command(capsys, "status", str(folder / "one")).code == 3
        assert len(command(capsys, "logs", str(folder / "one")).out.splitlines()) == whole.count(b"\n")
    finally:
        events.write_bytes(whole)


def test_events_are_chosen_by_role_and_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "chosen"
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("preset: maze\n")
    now = time.time()
    events = [
        {"time": now - 7200, "event": "started", "env_steps": 0},
        {"time": now - 3600, "event": "restart", "role": "actor", "index": 1, "cause": "killed"},
        {"time": now - 60, "event": "restart", "role": "actor", "index": 12, "cause": "killed"},
        {"time": now, "event": "notice", "role": "learner", "index": 0, "text": "two\nlines \x1b[31m"},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    def shown(*words: str) -> list[int]:
        out = command(capsys, "logs", str(run), *words).out.splitlines()
        whole = command(capsys, "logs", str(run)).out.splitlines()
        return [whole.index(line) for line in out]

    assert shown() == [0, 1, 2, 3]
    assert shown("--role", "actor") == [1, 2]
    assert shown("--role", "actor.1") == shown("--role", "actor[1]") == [1]
    assert shown("--role", "run") == [0]
    assert shown("--since", "30m") == [2, 3]
    assert shown("--since", "1.5h", "--role", "actor") == [1, 2]
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now - 100))
    assert shown("--since", stamp) == [2, 3]
    last = command(capsys, "logs", str(run)).out.splitlines()[-1]
    assert last.endswith("two lines [31m")
    (run / "config.yaml").unlink()  # the table of the folder is about real runs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("status {top}/nowhere", "is not a directory"),
        ("stop {top}/other", "holds no run"),
        ("stop {top}/several", "name one of the runs in it: {top}/several/seed-0, {top}/several/seed-1"),
        ("logs {top}/nowhere", "holds no run"),
        ("stop", "RUN_DIR is missing"),
        ("stop {top}/one --now", "unknown flag '--now'"),
        ("logs {top}/one --since yesterday", "90s, 10m, 2h or 1d"),
        ("logs {top}/one --since 5", "90s, 10m, 2h or 1d"),
        ("logs {top}/one --role actr", "Did you mean 'actor'?"),
        ("logs {top}/one -x", "unknown flag '-x'"),
        ("stop {top}/one", "is not running. It finished at 512 steps (budget)"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = command(capsys, *words.format(top=folder).split())
    assert (done.code, done.out) == (2, "")
    assert said.format(top=folder) in done.err
    assert len(done.err.splitlines()) == 1


def test_a_run_that_fails_says_so_in_its_events_and_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qfleet.control.monitor import Monitor

    def breaks(monitor: Monitor) -> None:
        raise ValueError("the dog ate it")

    monkeypatch.setattr(Monitor, "_observe", breaks)
    run = tmp_path / "run"
    assert command(capsys, "train", "cartpole", "--run-dir", str(run), "--quiet", *TINY).code == 3
    found = status(capsys, run)
    assert (found["state"], found["note"]) == ("failed", "ValueError: the dog ate it")
    assert " failed " in command(capsys, "logs", str(run)).out.splitlines()[-1]
    refused = command(capsys, "stop", str(run))
    assert (refused.code, "It failed" in refused.err) == (2, True)


def test_a_run_that_fails_before_it_trains_says_so_in_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qfleet import session

    def breaks(*args: object) -> None:
        raise ValueError("no such wire")

    monkeypatch.setattr(session, "build_program", breaks)
    run = tmp_path / "run"
    assert command(capsys, "train", "cartpole", "--run-dir", str(run), "--quiet", *TINY).code == 3
    found = status(capsys, run)
    assert (found["state"], found["note"]) == ("failed", "ValueError: no such wire")
