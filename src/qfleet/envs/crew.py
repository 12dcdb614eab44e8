"""Keeps a worker alive for each environment: hears what they say, ends those that hang, begins lost ones anew."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qfleet.core.errors import QfleetError
from qfleet.envs.nursery import KILLED, Nursery, payload
from qfleet.envs.slots import Slots, shared_file
from qfleet.envs.spaces import Layout
from qfleet.envs.worker import BUILT, RAISED, Maker, hear, tell

BACK_OFF_S = (0.0, 1.0, 2.0, 4.0)
"""How long a worker that was lost the first, second, ... time in a row stays away; one loss more and it is given up.

No setting: what fails so often at once fails for a reason, which its words name and no further try would mend."""
_PROVEN_S = 60.0
"""A worker that has lived this long is not lost "in a row" with its forerunner."""
_START_S = 60.0
"""How long an environment may take to be made, where its step may not take longer."""
_REPLACEMENTS = 3
"""How often in a row the process that starts the others may die before one of them has been of use."""
_SWEEP_S = 0.1
"""How often deadlines and back-offs are looked at."""


@dataclass(frozen=True)
class Heard:
    """What happened to the worker of environment `index`.

    Its environment is "built"; it "answered" with a code and a content; it is "lost" (now, whatever it was doing);
    its process has "ended" and it will be begun anew; it has ended and was "given up".
    """

    index: int
    what: Literal["built", "answered", "lost", "ended", "given up"]
    code: bytes = b""
    content: bytes = b""
    cause: str = ""
    killed: bool = False
    """Of one that has ended: whether somebody killed it, or what had forked it, so that the next one may well live."""


@dataclass
class _Post:
    """What is known of one environment's worker."""

    bell: socket.socket | None = None
    deadline: float = math.inf
    patience: float = 0.0
    """Seconds from when it was asked, or begun, to its deadline."""
    failures: int = 0
    """Losses in a row."""
    cause: str = ""
    """Why it was lost, where that is known before its process has ended."""
    spawn_at: float = math.inf
    born_at: float = 0.0
    given_up: bool = False


class Crew:
    """One worker for each maker, and the slots that they share with the caller."""

    def __init__(self, makers: Sequence[Maker], layout: Layout, step_timeout: float) -> None:
        self._known, self._timeout = payload(makers, layout), step_timeout
        self._memory = shared_file(layout, len(makers))
        self.slots = Slots(layout, len(makers), self._memory)
        self._posts = [_Post(spawn_at=0.0) for _ in makers]
        self._by_descriptor: dict[int, int] = {}
        self._poll = select.poll()
        self._swept = 0.0
        self._replaced = 0
        self._past_s = 0.0  # processor time of workers whose process has ended
        self._closed = False
        self._open_nursery()

    def ask(self, index: int, code: bytes, content: bytes = b"", steps: int = 1) -> None:
        """Ask a living worker for something that takes it as long as so many steps; it will answer or be lost."""
        post = self._posts[index]
        assert post.bell is not None, "only a living worker can be asked"
        post.patience = self._timeout * steps
        post.deadline = time.monotonic() + post.patience
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):  # `listen` will notice
            tell(post.bell, code, content)

    def listen(self, seconds: float = _SWEEP_S) -> list[Heard]:
        """Return what has happened; waits for that, but at most so many seconds and not longer than a tenth of one."""
        heard: list[Heard] = []
        now = time.monotonic()
        if now - self._swept > _SWEEP_S:
            heard += self._sweep(now)
        readable = [descriptor for descriptor, _ in self._poll.poll(0 if heard else 1000 * min(seconds, _SWEEP_S))]
        for descriptor in readable:
            if descriptor in self._by_descriptor:
                heard += self._hear(self._by_descriptor[descriptor])
        if self._nursery.fileno() in readable:  # last: it may open new bells under the numbers of old ones
            heard += self._deaths()
        return heard

    def praise(self, index: int) -> None:
        """Environment `index` works: its next loss is the first in a row."""
        self._posts[index].failures = 0

    def revive(self, index: int) -> None:
        """Try again with a worker that was given up."""
        self._posts[index] = _Post(spawn_at=0.0)

    def cpu_s(self) -> float:
        """Return the processor time of all workers so far, of those that have ended too."""
        return self._past_s + float(self.slots.cpu_s.sum())

    def close(self) -> None:
        """End every worker; may be called again."""
        if self._closed:
            return
        self._closed = True
        for post in self._posts:
            if post.bell is not None:
                post.bell.close()
        self._nursery.close()
        os.close(self._memory)

    def _open_nursery(self) -> None:
        self._nursery = Nursery(self._known, self._memory)
        self._poll.register(self._nursery.fileno(), select.POLLIN)

    def _sweep(self, now: float) -> list[Heard]:
        """Begin the workers whose time has come, and lose those that hang."""
        self._swept = now
        heard = []
        for index, post in enumerate(self._posts):
            if post.spawn_at <= now:
                self._spawn(index, now)
            elif post.deadline <= now and not self._has_answered(post):
                heard.append(self._lose(index, f"it has not answered for {post.patience:g} s (env.step_timeout)"))
        return heard

    @staticmethod
    def _has_answered(post: _Post) -> bool:
        """Return whether a late worker's answer lies there unread: the caller was away, not the worker."""
        assert post.bell is not None
        return bool(select.select([post.bell], [], [], 0)[0])

    def _spawn(self, index: int, now: float) -> None:
        failures = self._posts[index].failures
        bell = self._nursery.spawn(index)
        bell.settimeout(self._timeout)  # a worker that stops in the middle of a message is lost too
        patience = max(self._timeout, _START_S)
        self._posts[index] = _Post(bell, now + patience, patience, failures, born_at=now)
        self._by_descriptor[bell.fileno()] = index
        self._poll.register(bell.fileno(), select.POLLIN)

    def _hear(self, index: int) -> list[Heard]:
        """Return what a worker said; one that is gone without a word is lost."""
        post = self._posts[index]
        assert post.bell is not None
        try:
            message = hear(post.bell)
        except TimeoutError:
            message = None
        if message is None:
            return [self._lose(index, "")]
        code, content = message
        post.deadline = math.inf
        if code == RAISED:
            return [self._lose(index, content.decode())]
        if code == BUILT:
            self._replaced = 0
            return [Heard(index, "built")]
        return [Heard(index, "answered", code, content)]

    def _lose(self, index: int, cause: str) -> Heard:
        """Give a worker up; it is begun anew when its process has ended and can no longer write into its slot."""
        post = self._posts[index]
        assert post.bell is not None
        self._poll.unregister(post.bell.fileno())
        del self._by_descriptor[post.bell.fileno()]
        post.bell.close()
        failures = 1 if time.monotonic() - post.born_at > _PROVEN_S else post.failures + 1
        self._posts[index] = _Post(failures=failures, cause=cause)
        self._nursery.end(index)
        return Heard(index, "lost")

    def _deaths(self) -> list[Heard]:
        deaths = self._nursery.deaths()
        if deaths is None:
            return self._replace_nursery()
        heard = []
        for index, how in deaths:
            if self._posts[index].bell is not None:
                heard += self._last_words(index)
            heard.append(self._ended(index, how, how == KILLED))
        return heard

    def _last_words(self, index: int) -> list[Heard]:
        """Return what a worker said before its process ended, up to its loss."""
        heard: list[Heard] = []
        bell = self._posts[index].bell
        assert bell is not None
        bell.settimeout(_SWEEP_S)  # what the environment had started may still hold the other end
        while self._posts[index].bell is not None:
            heard += self._hear(index)
        return heard

    def _ended(self, index: int, how: str, killed: bool) -> Heard:
        self._past_s += float(self.slots.cpu_s[index])
        self.slots.cpu_s[index] = 0.0
        post = self._posts[index]
        killed = killed and not post.cause  # one that hangs, or has raised, is killed by us
        post.cause = post.cause or how
        if post.failures > len(BACK_OFF_S):
            post.given_up = True
            return Heard(index, "given up", cause=f"{post.cause}, the loss number {post.failures} in a row")
        post.spawn_at = time.monotonic() + BACK_OFF_S[post.failures - 1]
        if post.spawn_at <= time.monotonic():
            self._spawn(index, post.spawn_at)
        return Heard(index, "ended", cause=post.cause, killed=killed)

    def _replace_nursery(self) -> list[Heard]:
        """Begin every worker anew: the kernel ended them with the process that had forked them."""
        self._replaced += 1
        if self._replaced > _REPLACEMENTS:
            raise QfleetError(
                "the process that starts the environments' processes dies again and again: where the machine ran out"
                " of memory (the kernel's log says so), lower actor.envs and evaluation.envs, or set env.vectorisation"
                " to 'sync'; else look for who ends it"
            )
        self._poll.unregister(self._nursery.fileno())
        killed = self._nursery.close() == -signal.SIGKILL
        self._open_nursery()
        heard = []
        for index, post in enumerate(self._posts):
            if post.bell is not None:
                heard.append(self._lose(index, ""))
                post = self._posts[index]
            if post.spawn_at == math.inf and not post.given_up:
                heard.append(self._ended(index, "the process that starts environments was killed", killed))
        return heard
