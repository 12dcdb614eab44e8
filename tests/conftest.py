"""Fixtures and settings that several test folders share."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.forkserver
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

# `make test` repeats the same examples; `make test-all` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("searching", deadline=None)
settings.load_profile(os.environ.get("QFLEET_EXAMPLES", "repeatable"))

# Runs of one test process, or of one worker of several, clean up after each other and after nobody else.
_shared = tempfile.mkdtemp(prefix="qfleet-tests-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
os.environ["QFLEET_SHARED_MEMORY"] = _shared
atexit.register(shutil.rmtree, _shared, ignore_errors=True)

# What a developer's own `qfleet probe` found must not change the tests.
os.environ["QFLEET_CACHE"] = tempfile.mkdtemp()


WHOLE_RUNS = ("qfleet.program", *(f"torch.distributed.{part}" for part in ("pipelining", "fsdp", "tensor.parallel")))


@pytest.fixture(scope="session", autouse=True)
def forkserver_for_whole_runs() -> Iterator[None]:
    """Let the one forkserver of a test process import what whole runs need, whichever test is the first to start it.

    Otherwise every child of every later run imports it again: most of what the tests of whole runs would cost.
    """
    chosen = multiprocessing.forkserver.set_forkserver_preload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.forkserver, "set_forkserver_preload", lambda names: chosen([*names, *WHOLE_RUNS]))
        yield


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep what needs Ray together, so that only one of several workers starts it."""
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if "ray" in map(str, given.values()) or {"ray_session", "later_node", "second_node"} & set(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for the whole test run: starting it costs seconds."""
    pytest.importorskip("ray")
    from qfleet.runtime.ray_cluster import start_local, stop_local

    for left in (2, 1, 0):
        try:
            start_local()
            break
        except Exception as error:
            if "timed out during startup" not in str(error) or not left:  # Ray's limit on a busy machine
                raise
            stop_local()
    yield
    stop_local()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in bound]


class OtherNode:
    """A second Ray node on this machine, as `ray start` on another one would be."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def begin(self, seconds: float = 300.0) -> str:
        """Start it and wait until it is there; returns its id."""
        import ray

        before = {node["NodeID"] for node in ray.nodes()}
        until, self._started = time.monotonic() + seconds, []
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


@pytest.fixture
def later_node(ray_session: None) -> Iterator[OtherNode]:
    """A second node that is not there yet."""
    import ray

    node = OtherNode()
    yield node
    node.end()
    until = time.monotonic() + 300
    while sum(one["Alive"] for one in ray.nodes()) != 1:
        assert time.monotonic() < until, ray.nodes()
        time.sleep(0.1)


@pytest.fixture
def second_node(later_node: OtherNode) -> Callable[[], None]:
    """A second node on this machine; calling what is given ends it."""
    later_node.begin()
    return later_node.end
