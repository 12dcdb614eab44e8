"""Multiprocessing's temporary folder is gone when who made it is, however that one ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LONG_S = 120.0
BEGIN = "import os, signal, tempfile\nfrom qfleet.runtime.ray_steward import Steward\nsteward = Steward([], [])\n"
KILLED = "print(os.listdir(tempfile.gettempdir()), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
PRELOAD = """
import multiprocessing, os, signal, sys, tempfile, time
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir
import psutil
from qfleet.runtime.children import preload

def use():
    preload([])
    with open(os.path.join(tempfile.gettempdir(), "forkserver"), "w") as file:
        file.write(str(forkserver._forkserver._forkserver_pid))
    sys.exit(0)
"""
IN_A_CHILD = """
if __name__ == "__main__":
    own = get_temp_dir()
    child = multiprocessing.get_context("spawn").Process(target=use)
    child.start()
    child.join()
    with open(os.path.join(tempfile.gettempdir(), "forkserver")) as file:
        pid = int(file.read())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    print(child.exitcode, os.path.isdir(own), flush=True)
"""
FORKSERVER_ENDS = """
if __name__ == "__main__":
    preload([])
    own = get_temp_dir()
    os.close(forkserver._forkserver._forkserver_alive_fd)
    os.waitpid(forkserver._forkserver._forkserver_pid, 0)
    print(os.path.isdir(own), flush=True)
    os._exit(0)
"""
LEFT = "steward.leave()\nprint(os.listdir(tempfile.gettempdir()), flush=True)\nos._exit(0)"


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", BEGIN + script], stdout=subprocess.PIPE, text=True, env=environment, timeout=LONG_S
    )


def test_who_is_killed_leaves_no_folder_behind(tmp_path: Path) -> None:
    """Every run on Ray left a folder, and every run that was killed."""
    done = run(KILLED, tmp_path)
    assert (done.returncode, done.stdout[:7]) == (-signal.SIGKILL, "['pymp-"), "there was something to be left"
    until = time.monotonic() + LONG_S
    while list(tmp_path.iterdir()):  # its forkserver may still be importing
        if time.monotonic() > until:
            pytest.fail(f"left: {list(tmp_path.iterdir())}")
        time.sleep(0.02)


def test_a_steward_that_is_dismissed_leaves_none_even_if_its_forkserver_is_killed_with_it(tmp_path: Path) -> None:
    assert run(LEFT, tmp_path).stdout == "[]\n"


def run_file(script: str, folder: Path) -> str:
    """Run a script that multiprocessing can import in children; returns what it printed."""
    file = folder / "script.py"
    file.write_text(PRELOAD + script)
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=environment, timeout=LONG_S
    )
    return done.stdout


def test_a_child_that_trains_leaves_its_parent_the_folder(tmp_path: Path) -> None:
    """A child of multiprocessing inherits the name of its parent's folder, and removed it with all sockets there."""
    assert run_file(IN_A_CHILD, tmp_path) == "0 True\n"


def test_a_forkserver_that_ends_before_its_owner_leaves_the_folder_to_it(tmp_path: Path) -> None:
    assert run_file(FORKSERVER_ENDS, tmp_path) == "True\n"
