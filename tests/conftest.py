"""Fixtures and settings that several test folders share."""

from __future__ import annotations

import atexit
import multiprocessing.forkserver
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from qfleet.core.saving import Saving
from ray_nodes import OtherNode, other_node

# `make test` repeats the same examples; `make test-all` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("searching", deadline=None)
settings.load_profile(os.environ.get("QFLEET_EXAMPLES", "repeatable"))

# Runs of one test process, or of one worker of several, clean up after each other and after nobody else.
_shared = tempfile.mkdtemp(prefix="qfleet-tests-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
os.environ["QFLEET_SHARED_MEMORY"] = _shared
atexit.register(shutil.rmtree, _shared, ignore_errors=True)

# What a developer's own `qfleet probe` found must not change the tests.
os.environ["QFLEET_CACHE"] = tempfile.mkdtemp()

# Background jobs of a shell ignore SIGINT, and what `nohup` starts ignores SIGHUP: so would the runs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

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


@pytest.fixture
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process wait for their checkpoints to be written: a slow disk makes them longer, not different."""
    monkeypatch.setattr(Saving, "done", property(lambda saving: saving.join() is None))


@pytest.fixture
def later_node(ray_session: None) -> Iterator[OtherNode]:
    """A second node on this machine that is not there yet."""
    with other_node() as node:
        yield node


@pytest.fixture
def second_node(later_node: OtherNode) -> Callable[[], None]:
    """A second node on this machine; calling what is given ends it."""
    later_node.begin()
    return later_node.end
