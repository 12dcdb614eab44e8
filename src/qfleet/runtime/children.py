"""Processes of roles, as who begins them holds them: born by a forkserver that has imported torch, or spawned.

A preloaded child takes 0.01 s, any other one 4 s. Children never run the user's main module: a script needs no guard.
What a child is told is bytes here, so that who only begins children imports little.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import ModuleType
from typing import Any

from qfleet.core.errors import QfleetError
from qfleet.core.protocols import Report
from qfleet.core.spinning import brief_spinning
from qfleet.runtime import forkserver_folder
from qfleet.runtime.answers import Answer, Command, last_words
from qfleet.runtime.exhaustion import NO_PROCESSES, exhausted
from qfleet.runtime.held_back import ENDINGS, held_back

_FILES = 16
"""How many files may be opened on the way to begin a child; it takes about half of that."""
_REQUEST_S = 0.5
"""A request to the forkserver is made in less; what takes longer is that it imports torch, or hangs."""


@dataclass(frozen=True)
class Birth:
    """What it takes to begin a child."""

    name: str
    method: str
    """`forkserver`, or `spawn` for a process that never forked (CUDA)."""
    last_words: Path
    """Where a crash writes what the process was doing."""
    told: bytes
    """What is for the child alone."""


class Unbegun(QfleetError):
    """A child could not be begun; perhaps it can later."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"its process could not be begun: {cause}")


class Child:
    """One life of a role's process, as who began it holds it."""

    def __init__(self, birth: Birth) -> None:
        try:
            self._process, self._control = _started(birth)
        except (EOFError, ConnectionError) as error:
            raise Unbegun(
                f"the one that begins all others has died; where it may begin no more, {NO_PROCESSES}"
            ) from error
        except BlockingIOError as error:
            raise Unbegun(f"{error.strerror}; {NO_PROCESSES}") from error
        except OSError as error:
            raise Unbegun(exhausted(error) or str(error)) from error
        self.pid: int = self._process.pid
        self._last_words = birth.last_words
        self._built = False
        self._ended = False
        self._verdict = ""
        self._watched: list[Any] = [self._control, self._process.sentinel]
        self._poll = select.poll()  # one for all times: most children have nothing to say whenever one has
        for item in self._watched:
            self._poll.register(item, select.POLLIN)

    @property
    def gone(self) -> bool:
        """Whether its process has ended, and everything that it said was heard."""
        return self._process.sentinel not in self._watched

    def tell(self, command: Command, argument: str) -> None:
        """Send a command; a dead child is noticed by `hear`."""
        with contextlib.suppress(OSError):
            self._control.send((command, argument))

    def waitables(self) -> list[Any]:
        """Return what becomes readable when the child speaks or dies."""
        return self._watched

    def hear(self) -> list[Answer | Report]:
        """Return what the child said, and that it died if it did without saying why."""
        if not self._poll.poll(0):
            return []
        dead = not self.gone and not self._process.is_alive()  # asked first: what it said before is then all there
        heard: list[Answer | Report] = []
        try:
            while self._control in self._watched and self._control.poll():
                heard.append(self._control.recv())
        except (EOFError, OSError):
            self._unwatch(self._control)
        answers = {item.what for item in heard if isinstance(item, Answer)}
        self._built = self._built or "built" in answers
        told = self._ended or "failed" in answers
        if dead:
            self._unwatch(self._process.sentinel)
            if not told:
                heard.append(Answer("died", self._verdict or self._cause_of_death()))
        self._ended = told or dead
        return heard

    def _unwatch(self, item: Any) -> None:
        self._watched.remove(item)
        self._poll.unregister(item)

    def _cause_of_death(self) -> str:
        code: int | None = self._process.exitcode
        when = "" if self._built else " while it was being built"
        if code is None or code >= 0:
            return f"its process exited with code {code}{when}"
        return f"its process was killed by {signal.Signals(-code).name}{when}{last_words(self._last_words)}"

    def condemn(self, verdict: str) -> None:
        """Kill the process, which will be said to have died of this, unless it is dead already."""
        if not self._ended and self._process.is_alive():
            self._verdict = verdict
            self.kill()

    def join(self, until: float) -> None:
        """Wait for the process to end, at most until then."""
        _wake_forkserver()
        self._process.join(max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        """Ask the role to close."""
        self.tell("stop", "")

    def kill(self) -> None:
        """End the process, and what it may have started."""
        self._process.kill()
        end_process(self.pid)

    def release(self) -> None:
        """Give back what belongs to the dead process."""
        with contextlib.suppress(ValueError):  # the forkserver hangs, so that nobody knows whether it is dead
            self._process.close()
        self._control.close()


def _started(birth: Birth) -> tuple[Any, Connection]:
    """Begin a process; return it, and the pipe to it."""
    context: Any = multiprocessing.get_context(birth.method)
    control, theirs = context.Pipe()
    try:
        _require_files(control.fileno())
        if birth.method == "forkserver":
            _ensure_forkserver()
        process = context.Process(target=_be_child, name=birth.name, args=(birth.told, theirs, os.getpid()))
        with main_module_hidden(), held_back(_REQUEST_S) as held, _awake():  # of half a request the forkserver dies
            process.start()
        held.deliver()
    except BaseException:
        control.close()
        raise
    finally:
        theirs.close()
    return process, control


def _require_files(some: int) -> None:
    """Raise now what opening files would raise later: of half a request the forkserver dies, and all children.

    Takes the number of a file that is open, which not even standard input is for sure.
    """
    held = []
    try:
        for _ in range(_FILES):
            held.append(os.dup(some))
    finally:
        for one in held:
            os.close(one)


class Unborn:
    """The life of a role whose process could not be begun: it died of that."""

    pid = 0

    def __init__(self, cause: str) -> None:
        self._said = [Answer("died", cause)]

    def hear(self) -> list[Answer | Report]:
        """Return, once, that it died and of what."""
        said, self._said = self._said, []
        return [*said]

    def tell(self, command: Command, argument: str) -> None:
        """Do nothing: there is nobody."""

    def condemn(self, verdict: str) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def kill(self) -> None:
        """Do nothing."""

    def join(self, until: float) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


def wait_for(children: Iterable[Child], seconds: float, alarm: int | None = None) -> None:
    """Wait until one of them has something to say or dies, or something comes to the alarm, at most so long."""
    _wake_forkserver()
    poll = select.poll()
    for item in [*(item for child in children for item in child.waitables()), *([] if alarm is None else [alarm])]:
        poll.register(item, select.POLLIN)
    poll.poll(math.ceil(1e3 * seconds))


def end_process(pid: int) -> None:
    """Kill a process that leads its group, and what is left of the group if it is dead."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _be_child(told: bytes, control: Connection, supervisor: int) -> None:
    from qfleet.runtime.child import live  # not above: it imports torch, for which who begins children has no use

    live(told, control, supervisor)


def preload(modules: Collection[str]) -> None:
    """Start the forkserver with what children need, of modules such as these; has no effect once it runs.

    Signals that end a run are for the supervisor: the forkserver would show where it was in its imports, and could
    not begin roles anew that die meanwhile.
    """
    own = sorted(module for module in modules if module.startswith("qfleet."))
    first = forkserver_folder.__name__  # it takes seconds to import the others, in which its owner may be killed
    multiprocessing.get_context("forkserver").set_forkserver_preload([first, "torch", "qfleet.runtime.child", *own])
    _ensure_forkserver()


def _ensure_forkserver() -> None:
    """Start the forkserver, or another one where it has died."""
    resource_tracker.ensure_running()  # beforehand, since it unblocks the signals
    if multiprocessing.parent_process() is None:  # else it may be the parent's folder, who has more use for it
        os.environ[forkserver_folder.NAMED_BY] = f"{os.getpid()}:{get_temp_dir()}"
    heeded = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)  # a new process begins with what is blocked here
    try:
        with main_module_hidden(), brief_spinning():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heeded)
        os.environ.pop(forkserver_folder.NAMED_BY, None)
    _wake_forkserver()


def _wake_forkserver() -> None:
    """Let the forkserver go on where somebody has stopped it: without it no death is told, and no role begun anew."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _awake() -> Iterator[None]:
    """Let the forkserver go on whenever somebody stops it meanwhile: whoever waits for its answer cannot."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_REQUEST_S):
            _wake_forkserver()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def remove_folder() -> None:
    """Remove the folder by which the forkserver is reached; it begins no more children."""
    shutil.rmtree(get_temp_dir(), ignore_errors=True)


@contextlib.contextmanager
def main_module_hidden() -> Iterator[None]:
    """Show an empty main module to multiprocessing, which would otherwise run the user's script in every child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
