"""Where the roles of a run are on a Ray cluster: which node each gets, and which nodes will do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from qfleet.runtime import ray_cluster
from qfleet.runtime.graph import Node
from qfleet.runtime.ray_cluster import Site


class Grounds:
    """Which nodes have what a run needs; each is looked over once."""

    def __init__(self, rehearsal: Callable[[], Any] | None, in_flight: float) -> None:
        self._rehearsal, self._in_flight = rehearsal, in_flight
        self._fit: set[str] = set()
        self.unfit: set[str] = set()
        """The ids of nodes that cannot have roles: they lack something, or are lost, which Ray may not know yet."""

    def require(self, sites: Sequence[Site]) -> None:
        """Raise ConfigError unless all of these nodes will do."""
        new = [site for site in sites if site.id not in self._fit]
        ray_cluster.require_alike(new, sys.path, self._rehearsal)
        ray_cluster.require_store(new, self._in_flight)
        self._fit |= {site.id for site in new}


def settle_down(
    roles: Sequence[Node],
    anywhere: Collection[str],
    across: Collection[str],
    nodes: Sequence[Site],
    needs: Mapping[str, float],
    on_gpus: Collection[str],
) -> dict[str, Site]:
    """Return a node for each role of a kind in `anywhere`, and for each but the first of a kind in `across`.

    All others are on the first node.
    """
    roaming = [node.name for node in roles if node.kind in anywhere]
    ranks = [node.name for node in roles if node.kind in across and node.index > 0]
    here = len(roles) - len(roaming) - len(ranks)
    settled: list[Site] = []
    for name in ranks:
        taken = Counter([*[nodes[0]] * here, *settled])
        beside = Counter([nodes[0], *settled])
        settled.append(rank_site(nodes, taken, beside, name in on_gpus) or nodes[0])
    dealt = ray_cluster.deal(here, len(roaming), nodes, needs, settled)
    return dict(zip([*ranks, *roaming], [*settled, *dealt], strict=True))


def rank_site(nodes: Sequence[Site], roles: Mapping[Site, int], ranks: Mapping[Site, int], on_gpu: bool) -> Site | None:
    """Return the node that one more rank of a group goes to, given the roles and the ranks on each; None without room.

    That is the first one as long as it has room, and then the one that has most: GPUs that no other rank has, or CPUs
    that no other role has for ranks that compute there.
    """

    def room(site: Site) -> float:
        return site.gpus - ranks.get(site, 0) if on_gpu else site.cpus - roles.get(site, 0)

    best = nodes[0] if room(nodes[0]) >= 1 else max(nodes, key=room)
    return best if room(best) >= 1 else None
