"""The keepers of a run's nodes, as the driver holds them: each has the edges of its node and what crosses borders."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from qfleet.runtime import ray_cluster
from qfleet.runtime.crossings import Map
from qfleet.runtime.graph import Graph
from qfleet.runtime.ray_calls import DEAD, insist
from qfleet.runtime.ray_cluster import Site
from qfleet.runtime.ray_keeper import Keeper

_CALLS = 16
"""How many calls an actor answers at the same time: the driver's, and those of other nodes' keepers."""
_STOP_S, _ANSWER_S = 5.0, 2.0
"""How long keepers may take to close, and to say what they have."""


def make_actor(cls: type[Any], name: str, namespace: str, home: Site, **resources: Any) -> Any:
    """Return what makes an actor of a class on a node, for good or not at all, with such resources."""
    options = {"name": name, "namespace": namespace, "max_restarts": 0, "max_task_retries": 0, **resources}
    return ray.remote(cls).options(**options, max_concurrency=_CALLS, scheduling_strategy=ray_cluster.on(home))


class Keepers:
    """The keepers of the driver's node and of others, where there are such.

    Those of nodes that joined later are in a `Keepers` of their own, for the roles that began there together.
    """

    def __init__(self) -> None:
        self._actors: dict[Site, Any] = {}
        self._attending: dict[Any, Site] = {}
        self._edges: Mapping[str, set[str]] = {}

    def begin(
        self, graph: Graph, nodes: list[Site], folder: Path, drawn: Map, begun: Mapping[str, int] | None = None
    ) -> dict[Site, Path]:
        """Make the keepers and the edges of their nodes; returns where these are.

        What goes from the driver's node to the others begins with the messages whose numbers are in `begun`.
        """
        self._edges = drawn.edges
        namespace = f"qfleet-{secrets.token_hex(4)}"
        for site in nodes:
            own = folder if site is nodes[0] else None
            name = f"keeper-{self.index(site)}"
            self._actors[site] = make_actor(Keeper, name, namespace, site, num_cpus=0).remote(own)
        for site in nodes:
            self._attend(site)
        edges, by_id = dataclasses.replace(graph, nodes=[]), {site.id: keeper for site, keeper in self._actors.items()}
        for site in nodes[1:]:
            insist(self._actors[site].lay_out, edges, drawn.edges[site.id])
        for site, keeper in self._actors.items():
            first = {} if site is nodes[0] else begun or {}
            insist(keeper.begin, site.id, by_id, drawn.imports[site.id], drawn.exports[site.id], first)
        return {site: insist(keeper.folder) for site, keeper in self._actors.items()}

    def ask(self, method: str) -> None:
        """Have all keepers do something, and wait for it; one that is lost is noticed by whoever listens."""
        with contextlib.suppress(RayError):
            for keeper in self._actors.values():
                insist(getattr(keeper, method))

    def attended(self) -> list[Any]:
        """Return calls of which one ends when a node is lost."""
        return list(self._attending)

    def lost(self, ended: Collection[Any]) -> list[Site]:
        """Return the nodes that are lost, given which calls have ended; a call that was lost itself is made again."""
        lost = []
        for call in ended:
            if (site := self._attending.pop(call, None)) is None:
                continue
            try:
                ray.get(call)
            except DEAD:
                lost.append(site)
            except RayError:
                self._attend(site)
        return lost

    def _attend(self, site: Site) -> None:
        self._attending[self._actors[site].attend.remote()] = site

    def index(self, site: Site) -> int:
        """Return the number of a node."""
        return list({**self._actors, site: None}).index(site)

    def has(self, site: Site) -> bool:
        """Return whether it has a keeper on a node."""
        return site in self._actors

    @property
    def abroad(self) -> bool:
        """Whether it has a keeper on any node but the driver's."""
        return len(self._actors) > 1

    def laid_out(self, site: Site, edges: Sequence[str]) -> list[str]:
        """Return those of some edges that it has on a node."""
        return [edge for edge in edges if edge in self._edges[site.id]]

    def answers(self, site: Site) -> bool:
        """Return whether its keeper on a node can be reached: Ray takes a lost node for alive for some seconds."""
        try:
            insist(self._actors[site].folder, patience_s=_ANSWER_S)
        except RayError:
            return False
        return True

    def let_go(self, here: Site, edges: Sequence[str]) -> None:
        """Have nothing more of some streams come to this node, or go from it: their roles are elsewhere now."""
        if here in self._actors and (own := self.laid_out(here, edges)):
            insist(self._actors[here].let_go, own)

    def leave(self, site: Site) -> None:
        """Give a node back, and the driver's too if no other is left; nothing is on its way any more."""
        leaving = [site] if len(self._actors) > 2 else list(self._actors)
        _close([self._actors[one] for one in leaving])
        for one in leaving:
            self.forget(one)

    def kill(self, home: Site, pid: int) -> None:
        """End a process of another node, and what it has started."""
        with contextlib.suppress(RayError):  # with its node it is dead
            insist(self._actors[home].kill, pid, patience_s=_STOP_S)

    def seed(self, site: Site, counters: Mapping[str, Sequence[int]]) -> None:
        """Let the counters of a node begin with these cells."""
        insist(self._actors[site].seed, counters)

    def vacated(self, site: Site, edges: Sequence[str]) -> bool:
        """Return whether all that was sent into some streams of a node has been used up; True if it is lost."""
        if site not in self._actors:
            return True
        try:
            left: int = insist(self._actors[site].unfetched, edges, patience_s=_ANSWER_S)
        except RayError:
            return False
        return left == 0

    def forget(self, site: Site) -> None:
        """Go on without a node that was lost."""
        self._actors.pop(site, None)
        self._attending = {call: other for call, other in self._attending.items() if other != site}

    def close(self) -> None:
        """End all of them."""
        _close(list(self._actors.values()))


def _close(keepers: Sequence[Any]) -> None:
    for keeper in keepers:
        with contextlib.suppress(RayError):
            insist(keeper.close, patience_s=_STOP_S)
        ray.kill(keeper)
