"""A second node of Ray on this machine, as `ray start` on another one would be."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in bound]


@contextlib.contextmanager
def second_node() -> Iterator[Callable[[], None]]:
    """Have one beside the Ray that this process has joined; calling what is given ends it early."""
    import ray

    head = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head}", "--num-cpus=2", "--block"]
    # A node that has to find ports by itself waits 15 s for processes that tell them, and ends when they are slow.
    named = ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")
    command += [f"--{name}-port={port}" for name, port in zip(named, free_ports(len(named)), strict=True)]
    started: list[subprocess.Popen[bytes]] = []

    def await_nodes(count: int, start: bool) -> None:
        until = time.monotonic() + 300
        while sum(node["Alive"] for node in ray.nodes()) != count:
            assert time.monotonic() < until, ray.nodes()
            if start and (not started or started[-1].poll() is not None):  # Ray gives up when a machine is slow
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                started.append(subprocess.Popen(command, start_new_session=True, **quiet))
            time.sleep(0.1)

    def end() -> None:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    try:
        await_nodes(2, start=True)
        yield end
    finally:
        end()
        await_nodes(1, start=False)
