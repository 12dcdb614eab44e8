"""A machine that has run out of files: a run says so before it begins, and outlives it where that comes later."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from program_cases import short

import qfleet.api as api
import qfleet.session
from qfleet.control.monitor import Callbacks
from qfleet.observe.sinks import read_jsonl
from qfleet.program import place

SOME_S = 2.0
"""Longer than what is waited for before a second try."""


@pytest.mark.parametrize("files", [24, 45])
def test_a_run_that_may_open_too_few_files_says_so_in_one_line(files: int, tmp_path: Path) -> None:
    words = "-m qfleet train gym:CartPole-v1 --topology pipeline --placement processes --actors 2 --quiet --run-dir run"
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n {files}; exec $0 {words}", sys.executable],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert f"all {files} files that a process may open are open: raise that limit (`ulimit -n`)" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.slow  # this process has no file left to open either, whoever else in it wants one
def test_a_role_that_dies_while_no_file_can_be_opened_is_begun_when_one_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placements: list[Any] = []
    monkeypatch.setattr(qfleet.session, "place", lambda *given: placements.append(place(*given)) or placements[0])
    shortage = Shortage()

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if shortage.since is None and metrics["env_steps"] > 200:
            shortage.begin()
            os.kill(placements[0].pids()["actor-0"], signal.SIGKILL)
        elif shortage.since is not None and time.monotonic() > shortage.since + SOME_S:
            shortage.end()
            if "actor-0" in placements[0].pids():
                stop()

    settings = {"evaluation.every": 10**9, "checkpoint.every": 10**9, "track.every_s": 0.05}
    run = short(placement="processes", actors=2, env_steps=10**8, **settings)
    try:
        api.train(run, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=on_step))
    finally:
        shortage.end()
    deaths = [event for event in read_jsonl(tmp_path / "run" / "events.jsonl") if event["event"] == "restart"]
    assert {(death["role"], death["index"]) for death in deaths} == {("actor", 0)}, "the others went on"
    first, *others = [death["cause"] for death in deaths]
    assert first == "its process was killed by SIGKILL"
    assert others
    assert all("its process could not be begun: all" in cause for cause in others)


class Shortage:
    """Has this process hold all files that it may open."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._held: list[int] = []

    def begin(self) -> None:
        self.since = time.monotonic()
        most = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, self._limits[1]))
        with contextlib.suppress(OSError):
            while True:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    def end(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)
        while self._held:
            os.close(self._held.pop())
