"""One life of a role in a Ray actor, as the driver holds it: commands go and answers come by numbers, lost or not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from qfleet.core.protocols import Report
from qfleet.runtime.ray_actors import PATIENCE_S, RoleSetup, Said
from qfleet.runtime.worker import Answer, Command, last_words

_OVERDUE_S = 2 * PATIENCE_S
"""How long an actor may take to answer before it is asked again; it answers within half of it."""


class ActorLife:
    """One life of a role in an actor, as the driver holds it."""

    def __init__(self, actor: Any, setup: RoleSetup, kill: Callable[[int], None]) -> None:
        self.actor, self.pid = actor, 0
        self._setup, self._kill = setup, kill
        self._orders: list[tuple[Command, str]] = []
        self._obeyed = self._known = 0
        self._reports: list[Report] = []
        self._ended = self._stopped = False
        self._verdict = ""
        self._calls = [actor.live.remote(setup)]
        self._last = self._calls[0]
        """What ends when the role has closed, or its actor."""
        self._call()

    def _call(self) -> None:
        orders = dict(enumerate(self._orders[self._obeyed :], self._obeyed))
        self._newest, self._called_at = self.actor.talk.remote(orders, self._known, PATIENCE_S), time.monotonic()
        self._calls.append(self._newest)

    def tell(self, command: Command, argument: str) -> None:
        """Send a command; that it is dead is noticed by `hear`."""
        self._orders.append((command, argument))
        self._call()

    @property
    def reached(self) -> bool:
        """Whether the actor is known to have got every command."""
        return self._obeyed == len(self._orders)

    def waitables(self) -> list[Any]:
        """Return the calls that are with the actor."""
        return [] if self._ended else [*self._calls, *([self._last] if self._stopped else [])]

    def hear(self) -> list[Answer | Report]:
        """Return what the role said, and that its actor died if it did without saying why."""
        heard: list[Answer | Report] = []
        ready = [] if self._ended else ray.wait(self._calls, num_returns=len(self._calls), timeout=0)[0]
        self._calls = [call for call in self._calls if call not in ready]
        for call in ready:
            try:
                heard += self._understood(ray.get(call))
            except ActorDiedError as error:
                self._ended = True
                return [*heard, Answer("died", self._verdict or self._cause_of_death(error))]
            except RayTaskError as error:
                heard.append(Answer("failed", str(error), trace=str(error)))
            except RayError:  # the call or its answer was lost: both may be said again
                self._calls.append(self.actor.live.remote(self._setup))
                heard += self._reports  # what is lost on its way was no silence of the role
        self._ended = self._ended or any(isinstance(item, Answer) and item.what == "failed" for item in heard)
        if not self._ended and self._closed():
            self._ended = True
            heard.append(Answer("died", "its role has closed"))  # the actor itself has nothing more to do
        if not self._ended and (self._newest in ready or self._overdue()):
            self._call()
        return heard

    def _overdue(self) -> bool:
        """Return whether the newest call may be lost: Ray takes seconds to say so."""
        return self.pid > 0 and time.monotonic() - self._called_at > _OVERDUE_S

    def _closed(self) -> bool:
        """Return whether the role has closed, as it was asked to."""
        if not self._stopped or not ray.wait([self._last], timeout=0)[0]:
            return False
        try:
            ray.get(self._last)
        except (ActorDiedError, RayTaskError):
            return True
        except RayError:  # the question was lost
            self._last = self.actor.finish.remote()
            return False
        return True

    def _understood(self, said: Said | None) -> list[Answer | Report]:
        """Return what is new in what was said."""
        if said is None:
            return []
        self.pid, self._obeyed = said.pid, max(self._obeyed, said.obeyed)
        fresh = said.answers[self._known - said.first :]
        self._known += len(fresh)
        self._reports = said.reports or self._reports
        return [*said.reports, *fresh]

    def _cause_of_death(self, error: ActorDiedError) -> str:
        detail = " ".join(str(error).split()).split("Worker exit detail: ")[-1].split(" Some common causes")[0]
        return f"its Ray actor died: {detail[:300]}{last_words(self._setup.last_words)}"

    def condemn(self, verdict: str) -> None:
        """Kill the actor, which will be said to have died of this, unless it is dead already."""
        if not self._ended and not self._verdict:
            self._verdict = verdict
            if self.pid:
                self._kill(self.pid)  # one that is stopped or hangs can hear of nothing
            ray.kill(self.actor)

    def stop(self) -> None:
        """Ask the role to close."""
        self.tell("stop", "")
        self._last, self._stopped = self.actor.finish.remote(), True

    def kill(self) -> None:
        """End the actor."""
        ray.kill(self.actor)  # first: of an actor that ends otherwise Ray tells everybody
        self._last = self.actor.finish.remote()  # fails as soon as it is dead

    def join(self, until: float) -> None:
        """Wait for the end of the role or the actor, at most until then."""
        ray.wait([self._last], timeout=max(0.0, until - time.monotonic()))

    def release(self) -> None:
        """End what its role may have started, and the actor if it did not hear."""
        if self.pid:
            self._kill(self.pid)
