"""The Ray actors that become roles: made for their first lives, and kept warm for the next ones."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from qfleet.runtime import ray_cluster
from qfleet.runtime.ray_actors import RoleActor
from qfleet.runtime.ray_calls import insist
from qfleet.runtime.ray_cluster import Site
from qfleet.runtime.ray_keepers import make_actor

_WARM_S = 1.0
"""How long a spare may take to say that it lives."""


class Hands:
    """Makes the actors that become roles: those of the first lives, and on every node a warm one for the next death.

    A role with a GPU has no spare, which would have to have another one: its next actor gets that of the dead.
    """

    def __init__(self, modules: list[str]) -> None:
        self._modules, self._namespace = modules, f"qfleet-{secrets.token_hex(4)}"
        self._gpus: Mapping[str, float] = {}
        self._hired: dict[str, Any] = {}
        self._imports: dict[str, Any] = {}
        """The calls that return when the actors made beforehand have imported everything, by role."""
        self._spares: dict[Site, Any] = {}
        self._made = 0

    def hire(
        self,
        homes: Mapping[str, Site],
        shares: Mapping[Site, float],
        gpus: Mapping[str, float],
        needs: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Make the actors of these roles, each on its node and with its share of the CPUs there.

        By role, some have a part of a GPU, or what else they need.
        """
        self._gpus = gpus
        self._hired = {
            name: self._make(name, home, shares[home], gpus.get(name, 0.0), needs.get(name, {}))
            for name, home in homes.items()
        }
        ray_cluster.require_started(self._hired)

    def warm(self, homes: Collection[Site]) -> None:
        """Have a spare on each of these nodes from now on."""
        self._spares |= {home: self._make_spare(home) for home in homes}

    def prepared(self, names: Collection[str], home: Site) -> bool:
        """Return whether there is an actor for the next life of each of these roles; those that are not there are made.

        Nobody waits for them: that takes seconds, in which the present lives can go on.
        """
        for name in names:
            if name not in self._hired:
                self._hired[name] = self._make(f"{name}-{self._next()}", home, 0.0)
                self._imports[name] = self._hired[name].ready.remote()
        calls = [self._imports[name] for name in names if name in self._imports]
        return len(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) == len(calls) if calls else True

    def take(self, name: str, home: Site) -> Any:
        """Return an actor for a role: the one made for it, or else a spare."""
        self._imports.pop(name, None)
        if (first := self._hired.pop(name, None)) is not None:
            return first
        if gpus := self._gpus.get(name, 0.0):
            return self._make(f"{name}-{self._next()}", home, 0.0, gpus)
        spare = self._spares.get(home)
        if spare is None or not _alive(spare):
            spare = self._make_spare(home)
        self._spares[home] = self._make_spare(home)
        return spare

    def forget(self, site: Site) -> None:
        """Have no spare on a node any more."""
        if (spare := self._spares.pop(site, None)) is not None:
            ray.kill(spare)

    def dismiss(self) -> None:
        """End those that have become no role."""
        for actor in [*self._hired.values(), *self._spares.values()]:
            ray.kill(actor)

    def _make_spare(self, home: Site) -> Any:
        return self._make(f"spare-{self._next()}", home, 0.0)  # it gets the CPUs of the dead

    def _next(self) -> int:
        self._made += 1
        return self._made

    def _make(
        self, name: str, home: Site, cpus: float, gpus: float = 0.0, needs: Mapping[str, float] | None = None
    ) -> Any:
        resources = {"num_cpus": cpus, "num_gpus": gpus, "resources": dict(needs or {})}
        return make_actor(RoleActor, name, self._namespace, home, **resources).remote(self._modules, sys.path)


def _alive(actor: Any) -> bool:
    try:
        insist(actor.ready, patience_s=_WARM_S)
    except GetTimeoutError:
        return True  # it still imports, as a new one would
    except RayError:
        return False
    return True
