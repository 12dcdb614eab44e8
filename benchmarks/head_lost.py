"""Kills the driver and all of Ray at once, as a machine that goes down does, and times when the run is at work again.

    python benchmarks/head_lost.py [--rounds 5]

`deploy/keep.sh` drives a run in placement `ray`, in a session of its own. Each round waits until there is a newer
checkpoint, kills every process of the driver and of Ray but the script, and takes the seconds until the count of
environment steps goes on. Nobody does anything meanwhile. Steps since the last checkpoint are made again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

KEEP = Path(__file__).parents[1] / "deploy" / "keep.sh"
TRAIN = (
    "cartpole --topology pipeline --placement ray --actors 1 --env-steps 10000000 --target None --balance off"
    " --checkpoint.every 3000 --evaluation.every 1000000 --evaluation.test-episodes 2"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        run, path = Path(folder) / "run", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [str(KEEP), str(run), *TRAIN.split(), "--quiet"]
        keeper = subprocess.Popen(command, env={**os.environ, "PATH": path}, start_new_session=True, **quiet)
        try:
            seconds = [lose(keeper, run) for _ in range(rounds)]
        finally:
            kill(keeper, everything=True)
    print(f"seconds from the loss to the next step, {rounds} times: {', '.join(f'{one:.1f}' for one in seconds)}")
    print(f"median {statistics.median(seconds):.1f}, most {max(seconds):.1f} (aim: 60)")


def lose(keeper: subprocess.Popen[bytes], run: Path) -> float:
    """Kill all but the keeper once there is a new checkpoint; return the seconds until the run goes on."""
    before = newest(run)
    wait(lambda: newest(run) > before and steps(run) > 0)
    kill(keeper)
    lines, began = count(run), time.monotonic()
    wait(lambda: count(run) > lines + 1)  # the first line after a resume is of its beginning
    return time.monotonic() - began


def kill(keeper: subprocess.Popen[bytes], everything: bool = False) -> None:
    """Kill all processes that the keeper has started, and those that they have, at once."""
    victims = psutil.Process(keeper.pid).children(recursive=True)
    for victim in [keeper, *victims] if everything else victims:
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            os.kill(victim.pid, signal.SIGKILL)


def newest(run: Path) -> str:
    return max((path.name for path in run.glob("checkpoints/[0-9]*")), default="")


def count(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def steps(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return int(json.loads(lines[-1])["env_steps"]) if lines else 0


def wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not condition():
        if time.monotonic() > until:
            sys.exit("the run does not go on")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
