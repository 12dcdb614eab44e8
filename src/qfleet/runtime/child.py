"""What runs in a role's process: the role, and a thread that obeys who began it, reports to it and ends with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from qfleet.core import failpoints, history
from qfleet.core.memory import keep_freed_memory
from qfleet.core.protocols import Report
from qfleet.core.waiting import Waiter
from qfleet.runtime.answers import Answer, failed
from qfleet.runtime.channels import Ports
from qfleet.runtime.children import Birth
from qfleet.runtime.held_back import ENDINGS
from qfleet.runtime.worker import Worker, be_nice, name_process, note_last_words, set_threads

_HEARTBEAT_S = 0.5


@dataclass(frozen=True)
class RoleSetup:
    """What a child is told at its birth; the same in every life, but for its ports, and where roles share processes."""

    name: str
    payloads: tuple[bytes, ...]
    """The nodes of the roles that it is, pickled."""
    ports: Ports
    method: str
    threads: int
    background: bool
    last_words: Path
    faults: str = field(default_factory=failpoints.wanted)
    """Which failpoints are armed; a forkserver's environment is older."""
    history: str = field(default_factory=history.wanted)
    """Where it notes what it does."""

    def birth(self) -> Birth:
        """Return what begins the next life, with the ports as they are now."""
        return Birth(self.name, self.method, self.last_words, pickle.dumps(self))


def live(told: bytes, control: Connection, supervisor: int) -> None:
    """Be one role, or several, until told to stop."""
    setup: RoleSetup = pickle.loads(told)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the supervisor decides
    for number in (signal.SIGTERM, signal.SIGHUP):
        _leave_to_supervisor(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    os.setpgid(0, 0)  # so that what the role starts can be ended with it
    name_process(setup.name)
    set_threads(setup.threads)
    keep_freed_memory()
    if setup.background:
        be_nice()
    note_last_words(setup.last_words)
    failpoints.arm(setup.faults, setup.name, setup.ports.life)
    history.begin(setup.history, setup.name, setup.ports.life)
    lock = threading.Lock()

    def say(what: Answer | Report) -> None:
        # A supervisor that is gone is the business of the thread that listens to it.
        with lock, contextlib.suppress(OSError):
            control.send(what)

    alarm, ring = multiprocessing.Pipe(duplex=False)
    waiter = Waiter(alarm)

    def wait(waitables: Sequence[Any], seconds: float | None) -> None:
        if waiter.wait(waitables, seconds):
            alarm.recv_bytes()

    try:
        nodes = [pickle.loads(payload) for payload in setup.payloads]
    except Exception as error:
        say(failed(error))
        return
    worker = Worker(nodes, setup.ports.open, wait, say)

    def relay() -> None:
        """Pass commands on and report, whatever the role is doing; end with the supervisor."""
        watched = [control, *_death_notice(supervisor)]
        due = time.monotonic() + _HEARTBEAT_S
        try:
            while True:
                if ready := connection.wait(watched, max(0.0, due - time.monotonic())):
                    if control not in ready:
                        raise EOFError
                    worker.command(*control.recv())
                    ring.send_bytes(b"!")
                if time.monotonic() < due:  # also where there is always another command
                    continue
                due = time.monotonic() + _HEARTBEAT_S
                for report in worker.reports():
                    if takes_more(control):
                        say(report)
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # with all that the role has started

    threading.Thread(target=relay, name="relay", daemon=True).start()
    worker.run()


def takes_more(pipe: Connection) -> bool:
    """Return whether a report can be sent without waiting for who reads them: while nobody does, they are dropped.

    Whoever waits there hears no command either, and a final test may keep the supervisor for an hour.
    """
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLOUT)
    return bool(poll.poll(0))


def _leave_to_supervisor(number: int) -> None:
    """Let a signal pass here; a process that this one forks heeds it as any other does."""
    own = os.getpid()

    def heed(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(number, heed)


def _death_notice(pid: int) -> list[Any]:
    """Return what becomes readable when that process ends, where the system has it.

    The pipe to it tells the same, unless a process that it forked holds the pipe open.
    """
    try:
        return [os.pidfd_open(pid)]
    except (AttributeError, OSError):
        return []
