"""Runs a case on two machines that are none, and breaks the network between them for a while."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Thread

from cases import PACKETS, PARTED, Case

sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))

import machines
from machines import Machine, two_machines

HEAD, SECOND = "10.0.0.1", "10.0.0.2"
FOLDER = "QFLEET_CHAOS_FOLDER"
"""Where the case has its run, for whoever watches it from outside."""
KNOWN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "120000",  # else Ray gives up on a busy machine
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0" * 64,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(sys.path),
}
"""Ray gives a node up that it has not heard of for about 10 s: 30 by its own choice."""
CUT_AFTER_STEPS = 1500
LOST_OF_A_HUNDRED = 30
_PATIENCE_S = 600.0


def why_not() -> str:
    """Return what keeps networks from being cut here, empty if nothing."""
    return machines.why_not() or ("" if shutil.which("nft") else "needs nft")


def in_two_machines(what: Case, command: list[str], environment: Mapping[str, str]) -> str:
    """Run what a case is on the first of two machines, its actors on the second; returns the line that tells of it."""
    with two_machines((HEAD, SECOND)) as (first, second), tempfile.TemporaryDirectory() as folder:
        start_ray(first, f"--head --port=6379 --node-ip-address={HEAD} --include-dashboard=false")
        start_ray(second, f"--address={HEAD}:6379 --node-ip-address={SECOND}")
        cut_at: list[int] = []
        breaking = Thread(target=break_network, args=(what, second, Path(folder) / "run", cut_at), daemon=True)
        breaking.start()
        done = first.run(" ".join(command), {**KNOWN, **environment, FOLDER: folder}, seconds=_PATIENCE_S)
        found = json.loads(done.stdout.splitlines()[-1])
        if not cut_at or cut_at[0] >= what.env_steps:
            found["failed"] = found["failed"] or "the network was not broken while the run was at work"
        return json.dumps({**found, "cut_at": cut_at, "cut_s": round(what.cut_s, 1)})


def start_ray(machine: Machine, how: str) -> None:
    """Start a node of Ray, again when it gave up because the machine is busy."""
    named = ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")
    ports = " ".join(f"--{name}-port={port}" for port, name in enumerate(named, 20_001))
    for _ in range(4):
        done = machine.run(f"ray start {how} --num-cpus=3 {ports}", KNOWN)
        if done.returncode == 0:
            return
        machine.run("ray stop --force", KNOWN)
    raise AssertionError(done.stdout)


def break_network(what: Case, second: Machine, run: Path, cut_at: list[int]) -> None:
    """Break the network once the run is at work, for as long as the case says; have a node there again afterwards.

    `cut_at` is told at which steps that was.
    """
    with contextlib.suppress(TimeoutError):  # the case has failed before it was at work, and says why
        wait_until(lambda: steps(run) >= CUT_AFTER_STEPS)
        with broken_network(second, what.faults):
            cut_at.append(steps(run))
            time.sleep(what.cut_s)
        if what.faults == PARTED:
            wait_until(lambda: "raylet" not in second.processes())  # Ray ends a node that it has given up
            second.run("ray stop --force", KNOWN)
            start_ray(second, f"--address={HEAD}:6379 --node-ip-address={SECOND}")


@contextlib.contextmanager
def broken_network(machine: Machine, faults: str) -> Iterator[None]:
    """Drop what comes to a machine and what leaves it, or some of it."""
    some = f"numgen random mod 100 < {LOST_OF_A_HUNDRED} " if faults == PACKETS else ""
    ways = {"input": "iifname", "output": "oifname"}
    rules = [f"add rule inet cut {way} {port} != lo {some}drop" for way, port in ways.items()]
    hooks = [f"add chain inet cut {way} {{ type filter hook {way} priority 0; policy accept; }}" for way in ways]
    done = machine.run("nft -f - <<'END'\n" + "\n".join(["add table inet cut", *hooks, *rules]) + "\nEND", {})
    assert done.returncode == 0, done.stdout
    try:
        yield
    finally:
        machine.run("nft delete table inet cut", {})


def steps(run: Path) -> int:
    """Return how far a run is."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return int(json.loads(lines[-1])["env_steps"]) if lines else 0


def wait_until(condition: Callable[[], bool], seconds: float = _PATIENCE_S) -> None:
    """Wait for something to be true; TimeoutError if it does not come to be."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.1)
