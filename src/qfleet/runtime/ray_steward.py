"""The Ray actor that has the roles of a node as its children: begins them, passes on what they and the driver say.

Roles are no Ray actors themselves: Ray's threads would take turns with theirs at the interpreter's lock, and each would
import torch anew. Here neither torch nor roles are imported: its forkserver does, once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qfleet.core.protocols import Report
from qfleet.runtime.answers import Answer, Command, failed
from qfleet.runtime.children import Birth, Child, Unbegun, preload, remove_folder, wait_for

PATIENCE_S = 0.5
"""How long a call stays where it was made, when there is nothing to tell but reports."""
GONE = "gone"
"""What is said last of a child: its process has ended."""

Order = tuple[int, Birth | tuple[Command, str]]
"""The number of a child, and its birth or a command to it."""


@dataclass(frozen=True)
class Said:
    """What a steward tells its driver; children by their numbers."""

    pid: int
    """Its own."""
    obeyed: int
    """How many orders it has carried out."""
    first: int
    """The number of the first of the answers."""
    answers: list[tuple[int, Answer]]
    reports: list[tuple[int, Report]]
    """Those that came since it last spoke; the next ones come soon if these are lost."""
    pids: dict[int, int]
    """The processes of its children."""


class Steward:
    """Has children; each call bears to be made again by who lost its answer."""

    def __init__(self, modules: Sequence[str], search_path: Sequence[str]) -> None:
        sys.path += [folder for folder in search_path if folder not in sys.path]
        preload(modules)
        self._children: dict[int, Child] = {}
        self._reports: dict[tuple[int, int], Report] = {}
        """The newest, by child and by role where a child is several."""
        self._said: list[tuple[int, Answer]] = []
        self._forgotten = 0
        """How many answers are known to have come, and are kept no more."""
        self._obeyed = self._calls = 0
        self._turn = threading.Lock()
        self._alarm, self._ring = socket.socketpair()
        self._alarm.setblocking(False)

    def ready(self) -> None:
        """Return when it is there."""

    def leave(self) -> None:
        """Remove what nobody else would: Ray ends this process and its forkserver at once, without their last calls."""
        remove_folder()

    def talk(self, orders: Mapping[int, Order], known: int, patience: float) -> Said:
        """Carry out numbered orders, each once and in order; return what was said beyond the first `known` answers.

        Waits so many seconds for that, or until it is called again: one call at a time is enough to hear everything.
        Where there was an order, it says at once that it came.
        """
        self._calls += 1
        call = self._calls
        self._ring.send(b"!")  # a former call gives way
        with self._turn:
            before = self._obeyed
            while self._obeyed in orders:
                self._obey(*orders[self._obeyed])
                self._obeyed += 1
            del self._said[: max(0, known - self._forgotten)]
            self._forgotten = max(self._forgotten, known)
            until = time.monotonic() + (patience if self._obeyed == before else 0.0)
            self._listen(0.0)
            while not self._said and self._calls == call and (left := until - time.monotonic()) > 0:
                self._listen(left)
            reports = [(number, report) for (number, _), report in self._reports.items()]
            self._reports.clear()
            pids = {number: child.pid for number, child in self._children.items()}
            return Said(os.getpid(), self._obeyed, self._forgotten, list(self._said), reports, pids)

    def _obey(self, number: int, order: Birth | tuple[Command, str]) -> None:
        if not isinstance(order, Birth):
            if number in self._children:
                self._children[number].tell(*order)
            return
        try:
            self._children[number] = Child(order)
        except Unbegun as error:
            self._said += [(number, Answer("died", str(error))), (number, Answer(GONE))]
        except Exception as error:
            self._said += [(number, failed(error)), (number, Answer(GONE))]

    def _listen(self, seconds: float) -> None:
        """Hear from all children, waiting at most so long for the first that has something to say."""
        wait_for(self._children.values(), seconds, self._alarm.fileno())
        with contextlib.suppress(BlockingIOError):
            self._alarm.recv(4096)
        for number, child in list(self._children.items()):
            for item in child.hear():
                if isinstance(item, Report):
                    self._reports[number, item.index] = item
                else:
                    self._said.append((number, item))
            if child.gone:
                child.kill()  # what it has started
                child.release()
                del self._children[number]
                self._said.append((number, Answer(GONE)))
