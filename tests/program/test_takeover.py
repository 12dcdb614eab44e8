"""A driver that was stopped while another took its run over: it says so, ends, and has changed nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from program_cases import stop_at

import qfleet
from qfleet.observe.sinks import read_jsonl
from qfleet.runtime import checkpoint

DRIVER = """
    import sys
    sys.path.insert(0, "tests/program")
    from program_cases import short
    import qfleet
    from qfleet.core.errors import Superseded
    changes = {"placement": sys.argv[2], "actors": 1, "checkpoint.every": 500, "track.every_s": 0.1}
    changes |= {"replay.storage.kind": "mapped"}
    try:
        qfleet.train(short(env_steps=10**7, **changes), run_dir=sys.argv[1])
    except Superseded as error:
        print(error)
"""


def tree(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("placement", ["inline", "processes"])
def test_a_driver_that_wakes_after_a_takeover_ends_and_has_changed_nothing(placement: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), str(run), placement],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as driver:
        try:
            until = time.monotonic() + 300
            while not checkpoint.complete(run / "checkpoints") and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(driver.pid, signal.SIGSTOP)
            (run / ".lock").unlink()  # as on a disk of several machines, where the lock is not seen
            reached = checkpoint.newest_good(run / "checkpoints").manifest["env_steps"]
            qfleet.resume(run, callbacks=stop_at(reached + 600))
            before = tree(run)
            os.kill(driver.pid, signal.SIGCONT)
            said, _ = driver.communicate(timeout=300)
        finally:
            driver.kill()
    assert f"{run}: the run was taken over by process {os.getpid()} on " in said
    assert tree(run) == before
    begun = [event for event in read_jsonl(run / "events.jsonl") if event["event"] in ("started", "resumed")]
    assert [event["epoch"] for event in begun] == [1, 2]
    assert checkpoint.newest_good(run / "checkpoints").manifest["epoch"] == 2
