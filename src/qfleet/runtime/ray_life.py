"""Roles as the driver holds them that are children of a steward: orders go and answers come by numbers, lost or not."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from qfleet.core.protocols import Report
from qfleet.runtime.answers import Answer, Command
from qfleet.runtime.children import Birth
from qfleet.runtime.ray_calls import AGAIN_S, DEAD
from qfleet.runtime.ray_steward import GONE, PATIENCE_S, Order, Said

_OVERDUE_S = 2 * PATIENCE_S
"""How long a steward may take to answer before it is asked again; it answers within half of it."""
_DEAF_S = 20.0
"""How long one may say nothing, when it has a child that must end, before it is taken for dead."""
_UNBORN_S = 60.0
"""How long Ray may take to start one, likewise."""


class Line:
    """What is said between the driver and one steward; `kill` ends a process of the steward's node."""

    def __init__(self, steward: Any, kill: Callable[[int], None]) -> None:
        self.steward, self.kill, self.pid = steward, kill, 0
        self.lost = False
        """Whether the steward is dead."""
        self._lives: dict[int, RoleLife] = {}
        self._orders: dict[int, Order] = {}
        """Those that were not confirmed, by number."""
        self._given = self._sent = self._obeyed = self._known = self._entered = 0
        self._calls: list[Any] = []
        self._newest: Any = None
        self._called_at = self._heard_at = time.monotonic()

    @property
    def reached(self) -> bool:
        """Whether the steward is known to have got every order."""
        return self._obeyed == self._given

    def enter(self, life: RoleLife, birth: Birth) -> int:
        """Begin a child; returns its number."""
        self._entered += 1
        self._lives[self._entered] = life
        self.order(self._entered, birth)
        return self._entered

    def leave(self, number: int) -> None:
        """Hear no more of a child."""
        self._lives.pop(number, None)

    def order(self, number: int, order: Birth | tuple[Command, str]) -> None:
        """Give an order; it goes when the driver next listens, with all others."""
        self._orders[self._given] = (number, order)
        self._given += 1

    def waitables(self) -> list[Any]:
        """Return the calls that are with the steward, after all orders went there."""
        if not self.lost and self._lives and (self._sent < self._given or self._newest is None or self._overdue()):
            self._call()
        return [] if self.lost else list(self._calls)

    def _call(self) -> None:
        self._newest = self.steward.talk.remote(dict(self._orders), self._known, PATIENCE_S)
        self._calls.append(self._newest)
        self._called_at, self._sent = time.monotonic(), self._given

    def _overdue(self) -> bool:
        """Return whether the newest call may be lost: Ray takes seconds to say so."""
        return self.pid > 0 and time.monotonic() - self._called_at > _OVERDUE_S

    def listen(self, seconds: float = 0.0) -> None:
        """Give all lives what came for them, waiting at most so long for the first of it."""
        calls = self.waitables()
        if not calls:
            return
        ready, self._calls = ray.wait(calls, num_returns=1 if seconds else len(calls), timeout=seconds)
        for call in ready:
            self._newest = None if call == self._newest else self._newest
            try:
                self._understand(ray.get(call))
            except DEAD as error:
                self.end(Answer("died", f"its Ray actor died: {_detail(error)}"))
                return
            except RayTaskError as error:
                self.end(Answer("failed", str(error), trace=str(error)))
                return
            except RayError:  # the call or its answer was lost: both may be said again
                for life in self._lives.values():
                    life.excuse()
                time.sleep(AGAIN_S)
        self.waitables()  # there is always a call with it
        self._doubt()

    def _understand(self, said: Said) -> None:
        self.pid, self._obeyed, self._heard_at = said.pid, max(self._obeyed, said.obeyed), time.monotonic()
        self._orders = {number: order for number, order in self._orders.items() if number >= self._obeyed}
        fresh = said.answers[self._known - said.first :]
        self._known += len(fresh)
        told: list[tuple[int, Answer | Report]] = [*said.reports, *fresh]
        for number, pid in said.pids.items():
            if number in self._lives:
                self._lives[number].named(pid)
        for number, item in told:
            if number in self._lives:
                self._lives[number].receive(item)

    def end(self, answer: Answer) -> None:
        """Have all lives end with that: nothing will be heard of their steward any more."""
        self.lost = True
        for life in self._lives.values():
            life.receive(answer)
            life.receive(Answer(GONE))

    def _doubt(self) -> None:
        """Kill a steward that says nothing of a child that was killed, or has not even begun; Ray says that it died."""
        silent = time.monotonic() - self._heard_at
        if not any(life.condemned for life in self._lives.values()):
            return
        if not self.pid and silent > _UNBORN_S:
            ray.kill(self.steward)
            self.end(Answer("died", "Ray has not started the actor that its process would be a child of"))
        elif self.pid and silent > _DEAF_S:
            self.kill(self.pid)
            ray.kill(self.steward)


class RoleLife:
    """One life of a role, a child of a steward."""

    def __init__(self, line: Line, birth: Birth) -> None:
        self.line, self.pid = line, 0
        self._heard: list[Answer | Report] = []
        self._reports: dict[int, Report] = {}
        """The newest of each role that it is."""
        self._ended = self._gone = False
        self._verdict = ""
        self._number = line.enter(self, birth)

    @property
    def condemned(self) -> bool:
        """Whether it was killed and its end is not known yet."""
        return bool(self._verdict) and not self._gone

    def tell(self, command: Command, argument: str) -> None:
        """Send a command; that it is dead is noticed by `hear`."""
        self.line.order(self._number, (command, argument))

    def hear(self) -> list[Answer | Report]:
        """Return what the role said, and that it died if it did without saying why."""
        heard, self._heard = self._heard, []
        return heard

    def named(self, pid: int) -> None:
        """Learn which process it is."""
        if not self.pid and self._verdict:
            self.line.kill(pid)
        self.pid = pid

    def receive(self, item: Answer | Report) -> None:
        """Take in what was said of it."""
        if isinstance(item, Report):
            self._reports[item.index] = item
        elif item.what == GONE:
            self._gone = True
            return
        elif item.what == "died":
            if self._ended:
                return
            self._ended = True
            item = dataclasses.replace(item, cause=self._verdict or item.cause)
        self._ended = self._ended or (isinstance(item, Answer) and item.what == "failed")
        self._heard.append(item)

    def excuse(self) -> None:
        """Be heard of once more: what is lost on its way was no silence of the role."""
        self._heard += self._reports.values()

    def condemn(self, verdict: str) -> None:
        """Kill its process, which will be said to have died of this, unless it is dead already."""
        if not self._ended and not self._verdict:
            self._verdict = verdict
            self.kill()

    def stop(self) -> None:
        """Ask the role to close."""
        self.tell("stop", "")

    def kill(self) -> None:
        """End its process, and what that may have started."""
        if self.pid:
            self.line.kill(self.pid)

    def join(self, until: float) -> None:
        """Wait for the end of its process, at most until then."""
        while not self._gone and not self.line.lost and (left := until - time.monotonic()) > 0:
            self.line.listen(left)

    def release(self) -> None:
        """Hear no more of it."""
        self.line.leave(self._number)


def _detail(error: Exception) -> str:
    return " ".join(str(error).split()).split("Worker exit detail: ")[-1].split(" Some common causes")[0][:300]
