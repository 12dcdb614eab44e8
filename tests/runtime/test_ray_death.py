"""The death of the Ray that a run uses, its own or one that it joined: the run ends and says what to do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")

FIND = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
RUN = """
import json, os, signal
from test_process_placement import alive, own_folders, wait_until
from test_ray_placement import advance_until, position
from toy_roles import kept_pipeline

from qfleet.core.errors import RoleFailure
from qfleet.runtime import ray_watch
from qfleet.runtime.ray import RayPlacement

import psutil
import ray

if __name__ == "__main__":
    ray_watch.HEAD_S = 4.0
    part, joined = sys.argv[1], json.loads(sys.argv[2])
    placement = RayPlacement(kept_pipeline(100_000, pace_s=0.01), joined.get("address"))
    advance_until(placement, lambda: position(placement) > 5, "it runs")
    node = ray._private.worker._global_node
    kin = psutil.Process().children(recursive=True) + [psutil.Process(pid) for pid in placement.pids().values()]
    os.kill(joined[part] if joined else node.all_processes[part][0].process.pid, signal.SIGKILL)
    if joined and part == "gcs_server":
        before = position(placement)
        advance_until(placement, lambda: position(placement) > before + 50, "it goes on for a while")
    elif not joined:
        node.all_processes[part][0].process.wait()
    try:
        advance_until(placement, lambda: False, "Ray is missed")
    except RoleFailure as error:
        print("ENDED", error.exit_code, error)
    wait_until(lambda: not any(alive(one.pid) for one in kin), "all are gone")
    print("LEFT", own_folders(os.getpid()), flush=True)
"""
HEAD = """
import json, time
from qfleet.runtime.ray_cluster import start_local
import ray

if __name__ == "__main__":
    start_local()
    node = ray._private.worker._global_node
    pids = {kind: node.all_processes[kind][0].process.pid for kind in ("raylet", "gcs_server")}
    print("HEAD", json.dumps({"address": "127.0.0.1:" + node.gcs_address.rpartition(":")[2], **pids}), flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def another_ray(tmp_path: Path, token: str) -> Iterator[dict[str, Any]]:
    """Start a Ray that belongs to somebody else; gives its address, and the processes of its parts."""
    script = tmp_path / "head.py"
    script.write_text(HEAD)
    head = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
    )
    try:
        assert head.stdout is not None
        yield next(json.loads(line.removeprefix("HEAD ")) for line in head.stdout if line.startswith("HEAD "))
    finally:
        for one in [*psutil.Process(head.pid).children(recursive=True), head]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        head.communicate()


def ended(tmp_path: Path, part: str, joined: dict[str, Any], token: str) -> list[str]:
    """Let a run lose a part of its Ray; return what it said of that, and of what it left behind."""
    script = tmp_path / "run.py"
    script.write_text(FIND + RUN)
    environment = os.environ | ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {})
    words = [sys.executable, str(script), part, json.dumps(joined)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=180, env=environment)
    told = [line for line in ran.stdout.splitlines() if line.startswith(("ENDED", "LEFT"))]
    assert (len(told), ran.returncode) == (2, 0), ran.stdout + ran.stderr
    return [re.sub(r"for \d+ s;", "for N s;", line) for line in told]


REMEDY = "; the run is saved as of its last checkpoint: go on with `qfleet resume RUN`"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_a_run_whose_own_ray_is_killed_ends_at_once_and_says_how_to_go_on(part: str, tmp_path: Path) -> None:
    cause = f"Ray on this machine has ended (its {part} died, or was killed)"
    assert ended(tmp_path, part, {}, "") == [f"ENDED 3 node[0] failed: {cause}{REMEDY}", "LEFT []"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("raylet", "Ray on this machine has ended (its raylet died, or was killed)"),
        ("gcs_server", "the head of the Ray cluster has not answered for N s"),
    ],
)
def test_a_run_that_joined_a_ray_which_is_killed_does_not_hang_and_says_how_to_go_on(
    part: str, cause: str, tmp_path: Path
) -> None:
    """It hung for ever without the raylet; without the head, Ray ended it after a minute, without a word."""
    token = secrets.token_hex(32)
    with another_ray(tmp_path, token) as joined:
        assert ended(tmp_path, part, joined, token) == [f"ENDED 3 node[0] failed: {cause}{REMEDY}", "LEFT []"]
