"""A second node of Ray on this machine, as `ray start` on another one would be."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

_PATIENCE_S = 300.0


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in bound]


class OtherNode:
    """One that joins the Ray of this process, and leaves it."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def begin(self) -> str:
        """Start it and wait until it is there; returns its id."""
        import ray

        before = {node["NodeID"] for node in ray.nodes()}
        until, self._started = time.monotonic() + _PATIENCE_S, []
        while not (new := [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] not in before]):
            assert time.monotonic() < until, ray.nodes()
            if not self._started or self._started[-1].poll() is not None:  # Ray gives up when a machine is slow
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                self._started.append(subprocess.Popen(self._command(), start_new_session=True, **quiet))
            time.sleep(0.1)
        return str(new[0])

    def _command(self) -> list[str]:
        import ray

        head = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head}", "--num-cpus=2", "--block"]
        # A node that has to find ports by itself waits 15 s for processes that tell them, and ends when they are slow.
        named = ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")
        return command + [f"--{name}-port={port}" for name, port in zip(named, free_ports(len(named)), strict=True)]

    def end(self) -> None:
        """Kill all of it at once, as a machine that goes down does."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def other_node() -> Iterator[OtherNode]:
    """A node that is not there yet; afterwards it is gone, and Ray knows."""
    import ray

    node = OtherNode()
    try:
        yield node
    finally:
        node.end()
        until = time.monotonic() + _PATIENCE_S
        while sum(one["Alive"] for one in ray.nodes()) != 1:
            assert time.monotonic() < until, ray.nodes()
            time.sleep(0.1)
