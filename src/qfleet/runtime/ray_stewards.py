"""The stewards of a run, as the driver holds them: one for the roles of each node, and one for each role with a GPU."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from qfleet.runtime import ray_cluster
from qfleet.runtime.answers import Answer
from qfleet.runtime.ray_cluster import Site
from qfleet.runtime.ray_keepers import make_actor
from qfleet.runtime.ray_life import Line
from qfleet.runtime.ray_steward import Steward

_LEAVING_S = 2.0
"""How long stewards may take to leave before they are ended."""


class Stewards:
    """Knows the steward of every role, and makes a new one in the place of a dead one.

    A role with a GPU has a steward of its own, since Ray gives GPUs to actors; it keeps it for all lives of the role.
    """

    def __init__(self, modules: list[str], kill: Callable[[Site, int], None]) -> None:
        self._modules, self._kill, self._namespace = modules, kill, f"qfleet-{secrets.token_hex(4)}"
        self._gpus: Mapping[str, float] = {}
        self._lines: dict[tuple[Site, str], Line] = {}
        """By node, and by role where that has a GPU."""
        self._made = 0

    def hire(
        self,
        homes: Mapping[str, Site],
        shares: Mapping[Site, float],
        gpus: Mapping[str, float],
        needs: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Make the stewards of these roles, each on its node and with their shares of the CPUs there.

        By role, some have a part of a GPU, or what else they need.
        """
        self._gpus = gpus
        wanted: dict[tuple[Site, str], dict[str, float]] = {}
        for name, home in homes.items():
            all_of_it = wanted.setdefault(self._place(name, home), {})
            for resource, amount in {"CPU": shares[home], **needs.get(name, {})}.items():
                all_of_it[resource] = all_of_it.get(resource, 0.0) + amount
        for place, resources in wanted.items():
            self._lines[place] = self._make(place, resources)
        started = {name: self._lines[self._place(name, home)].steward for name, home in homes.items()}
        ray_cluster.require_started(started)

    def line(self, name: str, home: Site) -> Line:
        """Return the line to the steward of a role on a node, who lives as far as is known."""
        place = self._place(name, home)
        if not self.has(name, home):
            self._lines[place] = self._make(place, {})  # it gets the CPUs of the dead
        return self._lines[place]

    def has(self, name: str, home: Site) -> bool:
        """Return whether a role's steward lives, as far as is known: else Ray has to be asked for another one."""
        line = self._lines.get(self._place(name, home))
        return line is not None and not line.lost

    def lines(self) -> list[Line]:
        """Return the lines to all of them."""
        return list(self._lines.values())

    def pids(self, site: Site) -> list[int]:
        """Return the process numbers of those on a node, as far as they are known."""
        return [line.pid for place, line in self._lines.items() if place[0] == site and line.pid]

    def forget(self, site: Site) -> None:
        """Have nobody on a node any more; what lives there is dead."""
        lines = [self._lines.pop(place) for place in list(self._lines) if place[0] == site]
        _see_off(lines)
        for line in lines:
            line.end(Answer("died", f"{site.name} was given up"))

    def dismiss(self) -> None:
        """End all of them; those who still answer leave nothing behind."""
        _see_off(self.lines())

    def _place(self, name: str, home: Site) -> tuple[Site, str]:
        return home, name if self._gpus.get(name) else ""

    def _make(self, place: tuple[Site, str], resources: Mapping[str, float]) -> Line:
        site, role = place
        self._made += 1
        needs = {name: _countable(amount) for name, amount in resources.items()}
        cpus = needs.pop("CPU", 0.0)
        made = make_actor(
            Steward,
            f"steward-{self._made}",
            self._namespace,
            site,
            num_cpus=cpus,
            num_gpus=self._gpus.get(role, 0.0),
            resources=needs,
        )
        actor: Any = made.remote(self._modules, sys.path)
        return Line(actor, partial(self._kill, site))


def _see_off(lines: Sequence[Line]) -> None:
    """End stewards; those who still answer leave nothing behind."""
    leaving = [line.steward.leave.remote() for line in lines if not line.lost]
    if leaving:
        ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVING_S)
    for line in lines:
        ray.kill(line.steward)


def _countable(amount: float) -> float:
    """Return as much of a resource as Ray can give away at once: beyond one only whole numbers."""
    return float(math.floor(amount + 1e-6)) if amount > 1.0 else amount
