"""What a person with two cores types for Pong: it plans by real measurements, trains, tests and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from commands import environment, start_words

from qfleet.runtime.memory import shared_memory_root

WORDS = ("train", "atari:pong", "--placement", "processes", "--actors", "auto")
SMALL = (
    "--env-steps", "2000", "--learner.learning-starts", "500", "--replay.capacity", "4000",
    "--evaluation.every", "1000", "--evaluation.episodes", "1", "--evaluation.test-episodes", "1",
    "--evaluation.envs", "1", "--evaluation.max-episode-steps", "100",
)  # fmt: skip
LONGEST_S, SOON_S = 400.0, 30.0
"""How long all may take on a busy machine; and what had been started, to end after it."""


def others_of(session: int) -> list[psutil.Process]:
    """Return the living processes of a session."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_pong_with_as_many_actors_as_the_plan_finds_trains_on_two_cores(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    whole, run, said = os.sched_getaffinity(0), tmp_path / "run", tmp_path / "said"
    os.sched_setaffinity(0, sorted(whole)[:2])
    try:
        with said.open("w") as file:
            process = subprocess.Popen(
                start_words([*WORDS, *SMALL, "--run-dir", str(run)]),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )
    finally:
        os.sched_setaffinity(0, whole)
    try:
        assert process.wait(LONGEST_S) == 0, said.read_text()
        until = time.monotonic() + SOON_S
        while left := others_of(process.pid):
            assert time.monotonic() < until, [process.cmdline() for process in left]
            time.sleep(0.1)
    finally:
        for one in others_of(process.pid):
            one.kill()
        process.wait()
    assert not list(shared_memory_root().glob(f"*qfleet-{process.pid}-*"))
    assert "Traceback" not in said.read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["env_steps"] >= 2000
    assert summary["updates"] > 0
    assert summary["plan"]["settings"]["actors"] >= 1
