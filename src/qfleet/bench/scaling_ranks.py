"""Starts learner ranks as processes of this machine, in a network namespace of their own where one can be made."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict

from qfleet.bench.scaling_rank import TIMEOUT_S, Done, Job, run_rank
from qfleet.core.errors import QfleetError

LOOPBACK = "lo"
APART = ("unshare", "--map-root-user", "--net")
"""Runs what follows it in a network namespace of its own, also for those who are not root."""
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]);"
    " from qfleet.bench.scaling_ranks import main; main(*sys.argv[2:])"
)
_SET_FLAGS, _UP = 0x8914, 1
"""Linux: the request that sets an interface's flags, and the flag of one that is in use."""


def can_stand_apart() -> bool:
    """Return whether processes can have a network namespace of their own here: it counts nobody else's bytes."""
    try:
        return subprocess.run([*APART, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def run_ranks(size: int, jobs: Sequence[Job], apart: bool) -> list[Done]:
    """Return what so many ranks do; with `apart` in their own namespace, where the loopback's bytes are counted."""
    described = json.dumps([asdict(job) for job in jobs])
    with tempfile.TemporaryDirectory(prefix="qfleet-ranks-") as directory:
        own = [sys.executable, "-c", _START, json.dumps(sys.path), str(size), f"file://{directory}/meeting", described]
        words = [*APART, *own, LOOPBACK] if apart else own
        limit = TIMEOUT_S + 20 * sum(job.seconds for job in jobs)
        return [Done(**one) for one in json.loads(program_output(words, limit))]


def program_output(words: Sequence[str], limit_s: float) -> str:
    """Return what a program of learner ranks prints; each of its processes has one thread."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    try:
        ended = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **threads}, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise QfleetError(f"learner ranks were not done within {error.timeout:.0f} s") from error
    if ended.returncode:
        raise QfleetError(f"learner ranks failed: {ended.stderr.strip()[-2000:]}")
    return ended.stdout


def main(ranks: str, rendezvous: str, jobs: str, interface: str = "") -> None:
    """Fork the ranks, which share what was imported, and print what the first one found."""
    if interface:
        raise_interface(interface)
    size, wanted = int(ranks), [Job(**job) for job in json.loads(jobs)]
    for rank in range(1, size):
        if os.fork() == 0:
            run_rank(rank, size, rendezvous, wanted)
            os._exit(0)
    found = run_rank(0, size, rendezvous, wanted, interface)
    for _ in range(1, size):
        os.wait()
    json.dump([asdict(done) for done in found], sys.stdout)


def raise_interface(name: str) -> None:
    """Put an interface of this process's namespace to use; that of a new one is not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SET_FLAGS, struct.pack("16sh22x", name.encode(), _UP))
