"""The placement for one machine: every role in a process of its own, edges in shared memory, this process supervising.

Children come from a forkserver that has preloaded torch and qfleet (0.01 s each instead of 4 s), or are spawned where a
role asks for a process that never forked (CUDA). They never run the user's main module: a script needs no guard.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError
from qfleet.core.protocols import Report
from qfleet.runtime.channels import Ports, lay_out
from qfleet.runtime.graph import Graph, Node
from qfleet.runtime.memory import RunFolder
from qfleet.runtime.supervisor import Member, SupervisedPlacement
from qfleet.runtime.worker import Answer, Command, OpenEnds, Worker, failed, set_threads

_HEARTBEAT_S = 0.5
_STOP_S, _TERMINATE_S, _KILL_S = 5.0, 1.0, 5.0
"""How long a child may take to close its role, to heed SIGTERM, and to be gone after SIGKILL."""
_PR_SET_PDEATHSIG = 1


class ProcessPlacement(SupervisedPlacement):
    """Runs each node of a graph in its own process.

    `spawn` names the kinds of roles that must not be forked; `threads` gives the threads of torch and OpenMP by kind,
    one where not given.
    """

    name = "processes"

    def __init__(self, graph: Graph, spawn: Collection[str] = (), threads: Mapping[str, int] | None = None) -> None:
        super().__init__(graph)
        payloads = [_payload(node) for node in graph.nodes]
        self._folder = RunFolder()
        self._children: dict[str, _Child] = {}
        atexit.register(self.close)  # before multiprocessing's own handler, which would wait for the children
        try:
            ports, self._ports = lay_out(graph, self._folder.path)
            self._ends = OpenEnds(self._ports.open)
            _preload(graph)
            for node, payload in zip(graph.nodes, payloads, strict=True):
                method = "spawn" if node.kind in spawn else "forkserver"
                setup = _Setup(payload, ports[node.name], (threads or {}).get(node.kind, 1))
                self._children[node.name] = _Child(node.name, method, setup)
            self._await("built")
        except BaseException:
            self.close()
            raise

    def open(self, end: Any) -> Any:
        """Return the live handle of an end that the caller holds."""
        return self._ends.open(end)

    def pids(self) -> dict[str, int]:
        """Return the process numbers by node name, for tools that watch or kill."""
        return {name: child.pid for name, child in self._children.items()}

    def _tell(self, member: Member, command: Command, argument: str) -> None:
        self._children[member.name].tell(command, argument)

    def _listen(self, seconds: float) -> list[tuple[Member, Answer | Report]]:
        connection.wait([item for child in self._children.values() for item in child.waitables()], seconds)
        return [(member, heard) for member in self.crew for heard in self._children[member.name].hear()]

    def _save_own_ends(self, directory: Path) -> None:
        self._ends.save(directory, "caller")

    def _restore_own_ends(self, directory: Path) -> None:
        self._ends.restore(directory, "caller")

    def _end(self) -> None:
        atexit.unregister(self.close)
        children = self._children.values()
        for means, patience_s in ((_Child.stop, _STOP_S), (_Child.terminate, _TERMINATE_S), (_Child.kill, _KILL_S)):
            for child in children:
                means(child)
            until = time.monotonic() + patience_s
            for child in children:
                child.join(until)
        for child in children:
            child.release()
        with contextlib.suppress(AttributeError):  # laying out the edges may be what failed
            self._ports.close()
        self._folder.remove()


class _Setup:
    """What a child is told at its birth."""

    def __init__(self, payload: bytes, ports: Ports, threads: int) -> None:
        self.payload, self.ports, self.threads = payload, ports, threads


class _Child:
    """One role's process, as the supervisor holds it."""

    def __init__(self, name: str, method: str, setup: _Setup) -> None:
        context: Any = multiprocessing.get_context(method)
        self._control, theirs = context.Pipe()
        # The kernel sends the parent-death signal when the parent's *thread* ends: only a main thread's child asks.
        orphaned_by_thread = method == "spawn" and threading.current_thread() is not threading.main_thread()
        self._process = context.Process(target=_child_main, name=name, args=(setup, theirs, not orphaned_by_thread))
        with _main_module_hidden():
            self._process.start()
        theirs.close()
        setup.ports.close()  # so that a dead child is seen by its peers
        self.pid: int = self._process.pid
        self._deaf = False
        self._ended = False

    def tell(self, command: Command, argument: str) -> None:
        """Send a command; a dead child is noticed by `hear`."""
        with contextlib.suppress(OSError):
            self._control.send((command, argument))

    def waitables(self) -> list[Any]:
        """Return what becomes readable when the child speaks or dies."""
        return ([] if self._deaf else [self._control]) + ([] if self._ended else [self._process.sentinel])

    def hear(self) -> list[Answer | Report]:
        """Return what the child said, and that it died if it did without saying why."""
        ended = not self._ended and not self._process.is_alive()  # asked first: what it said before is then all there
        heard: list[Answer | Report] = []
        try:
            while not self._deaf and self._control.poll():
                heard.append(self._control.recv())
        except (EOFError, OSError):
            self._deaf = True
        told = any(isinstance(item, Answer) and item.what == "failed" for item in heard)
        self._ended = self._ended or told
        if ended and not told:
            self._ended = True
            heard.append(Answer("died", _cause_of_death(self._process.exitcode)))
        return heard

    def join(self, until: float) -> None:
        """Wait for the process to end, at most until then."""
        self._process.join(max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        """Ask the role to close."""
        self.tell("stop", "")

    def terminate(self) -> None:
        """Ask the process to end, if it lives."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process, and what it may have started."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Give back what belongs to the dead process."""
        self._process.close()
        self._control.close()


def _cause_of_death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"its process was killed by {signal.Signals(-exit_code).name}"
    return f"its process exited with code {exit_code}"


def _preload(graph: Graph) -> None:
    """Name what the forkserver imports before its first child; has no effect once it runs."""
    modules = {node.build.__module__ for node in graph.nodes}
    own = sorted(module for module in modules if module.startswith("qfleet."))
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", __name__, *own])


def _payload(node: Node) -> bytes:
    """Return a node as bytes; refuses what a child could not import."""
    with _main_module_hidden():
        try:
            return pickle.dumps(node)
        except Exception as error:
            raise ConfigError(
                f"{node.name} cannot be sent to another process ({error}): "
                "run with --placement inline or move the class to a module"
            ) from error


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Show an empty main module to multiprocessing, which would otherwise run the user's script in every child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _child_main(setup: _Setup, control: Connection, die_with_parent: bool) -> None:
    """Be one role until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the supervisor decides
    os.setpgid(0, 0)  # so that what the role starts can be ended with it
    if die_with_parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    set_threads(setup.threads)
    lock = threading.Lock()

    def say(what: Answer | Report) -> None:
        # A supervisor that is gone is the business of the thread that listens to it.
        with lock, contextlib.suppress(OSError):
            control.send(what)

    alarm, ring = multiprocessing.Pipe(duplex=False)

    def wait(waitables: Sequence[Any], seconds: float | None) -> None:
        if alarm in connection.wait([*waitables, alarm], seconds):
            alarm.recv_bytes()

    try:
        node = pickle.loads(setup.payload)
    except Exception as error:
        say(failed(error))
        return
    worker = Worker(node, setup.ports.open, wait, say)

    def relay() -> None:
        """Pass commands on and report, whatever the role is doing; end with the supervisor."""
        try:
            while True:
                while control.poll(_HEARTBEAT_S):
                    worker.command(*control.recv())
                    ring.send_bytes(b"!")
                say(worker.report())
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=relay, name="relay", daemon=True).start()
    worker.run()
