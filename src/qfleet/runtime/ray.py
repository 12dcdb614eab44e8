"""The placement for many machines: every role a Ray actor, edges in the shared memory of its node, all watched here.

Ray places, starts and ends processes, and carries what goes from node to node. It restarts nothing: a rebuilt empty
actor is worse than a death, which is repaired here as in `processes`. Only the files `ray*.py` of this folder name ray.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from qfleet.core import failpoints
from qfleet.core.errors import ConfigError, MissingExtra, RoleFailure

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
except ImportError as error:
    raise MissingExtra("ray", "ray", "the placement 'ray'") from error

from qfleet.runtime import ray_cluster
from qfleet.runtime.channels import Ports, StreamLevels, lay_out
from qfleet.runtime.crossings import Map, draw_map
from qfleet.runtime.graph import Graph, Node
from qfleet.runtime.memory import RunFolder
from qfleet.runtime.ray_actors import Keeper, RoleActor, RoleSetup, end_process
from qfleet.runtime.ray_calls import insist
from qfleet.runtime.ray_cluster import Site
from qfleet.runtime.ray_life import ActorLife
from qfleet.runtime.reviving import Revival, RevivingPlacement
from qfleet.runtime.supervisor import Member
from qfleet.runtime.worker import OpenEnds

_CALLS = 16
"""How many calls an actor answers at the same time: the driver's, and those of other nodes' keepers."""
_WARM_S, _STOP_S = 1.0, 5.0
"""How long a spare may take to say that it lives, and keepers to close."""


class RayPlacement(RevivingPlacement):
    """Runs each node of a graph as a Ray actor, on the cluster at `address`, or on this machine if None.

    Kinds in `anywhere` may be on any node of the cluster, all others are on this one. Where nodes besides this one are
    used, `rehearsal` must succeed there first, and their object stores must hold `in_flight` bytes. `threads` gives the
    threads of torch and OpenMP by kind, one where not given; kinds in `background` leave a core to any other.
    """

    name = "ray"

    def __init__(
        self,
        graph: Graph,
        address: str | None = None,
        threads: Mapping[str, int] | None = None,
        background: Collection[str] = (),
        anywhere: Collection[str] = (),
        rehearsal: Callable[[], Any] | None = None,
        in_flight: float = 0.0,
        **revival: Unpack[Revival],
    ) -> None:
        super().__init__(graph, **revival)
        payloads = {node.name: _payload(node) for node in graph.nodes}
        self._owns_ray = ray_cluster.connect(address)
        self._folder = RunFolder()
        self._keepers = _Keepers()
        self._hands = _Hands(sorted({node.build.__module__ for node in graph.nodes}))
        self._setups: dict[str, RoleSetup] = {}
        self._carrying = False
        atexit.register(self.close)  # before Ray's own handler
        try:
            nodes = ray_cluster.sites()
            self._homes = _settle_down(graph, anywhere, nodes)
            here, *others = dict.fromkeys([nodes[0], *self._homes.values()])
            ray_cluster.require_alike(others, sys.path, rehearsal)
            ray_cluster.require_store(others, in_flight)
            self._warn_of_crowd(ray.cluster_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]
            self._hands.hire(self._homes, ray_cluster.cpu_shares(self._homes.values()))
            folders = self._lay_out(graph, here, others)
            for node in graph.nodes:
                folder = folders[self._homes[node.name]]
                ports = self._ports[node.name] = Ports(folder)
                count, behind = (threads or {}).get(node.kind, 1), node.kind in background
                last_words = folder / f"{node.name}.last_words"
                self._setups[node.name] = RoleSetup(
                    node.name, payloads[node.name], ports, count, behind, last_words, failpoints.wanted()
                )
            self._lives |= {node.name: self._begin(node.name) for node in graph.nodes}
            self._await("built")
            self._hands.warm({home for name, home in self._homes.items() if name not in self._mortal})
        except BaseException:
            self.close()
            raise

    def _lay_out(self, graph: Graph, here: Site, others: list[Site]) -> dict[Site, Path]:
        """Make all edges; returns where those of each node are."""
        lay_out(graph, self._folder.path)
        self._levels = StreamLevels(graph, self._folder.path)
        self._ends = OpenEnds(Ports(self._folder.path, hold=False).open)
        if not others:
            return {here: self._folder.path}
        homes = {name: site.id for name, site in self._homes.items()}
        return self._keepers.begin(graph, [here, *others], self._folder.path, draw_map(graph, homes, here.id))

    def advance(self) -> None:
        """Hear from the roles, as every placement does; what goes from node to node goes on from the first time on."""
        if not self._carrying:
            self._carrying = True
            self._keepers.ask("carry")
        super().advance()

    def pause(self) -> None:
        """Stop all roles between two steps, and have everything arrive that they sent."""
        super().pause()
        for _ in range(2):  # what came to this node in the first round goes on in the second
            self._keepers.ask("settle")

    def _reached(self, member: Member) -> bool:
        life = self._lives.get(member.name)
        return not isinstance(life, ActorLife) or life.reached

    def _begin(self, name: str) -> ActorLife:
        home = self._homes[name]
        return ActorLife(self._hands.take(name, home), self._setups[name], lambda pid: self._keepers.kill(home, pid))

    def _wait_for_news(self, seconds: float) -> None:
        calls = [*self._keepers.attended(), *(call for life in self._lives.values() for call in life.waitables())]
        if not calls:
            time.sleep(seconds)
            return
        ready, _ = ray.wait(calls, timeout=seconds)
        if lost := self._keepers.lost(ready):
            self.close()
            cause = (
                f"{lost[0].name} was lost with what its roles kept: `qfleet resume` goes on from the last checkpoint"
            )
            raise RoleFailure("node", self._keepers.index(lost[0]), cause, died=True)

    def _end(self) -> None:
        atexit.unregister(self.close)
        self._end_lives()
        self._hands.dismiss()
        self._keepers.close()
        self._folder.remove()
        if self._owns_ray:
            ray_cluster.stop_local()


def _settle_down(graph: Graph, anywhere: Collection[str], nodes: Sequence[Site]) -> dict[str, Site]:
    """Return the node that each role is on, in all its lives."""
    roaming = [node.name for node in graph.nodes if node.kind in anywhere]
    dealt = ray_cluster.deal(len(graph.nodes) - len(roaming), len(roaming), nodes)
    return {node.name: nodes[0] for node in graph.nodes} | dict(zip(roaming, dealt, strict=True))


def _payload(node: Node) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(node)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigError(
            f"{node.name} cannot be sent to another process ({error}): run with --placement inline"
        ) from error
    return packed


class _Hands:
    """Makes the actors that become roles: those of the first lives, and on every node a warm one for the next death."""

    def __init__(self, modules: list[str]) -> None:
        self._modules, self._namespace = modules, f"qfleet-{secrets.token_hex(4)}"
        self._hired: dict[str, Any] = {}
        self._spares: dict[Site, Any] = {}
        self._made = 0

    def hire(self, homes: Mapping[str, Site], shares: Mapping[Site, float]) -> None:
        """Make the actors of these roles, each on its node and with its share of the CPUs there."""
        self._hired = {name: self._make(name, home, shares[home]) for name, home in homes.items()}
        ray_cluster.require_started(self._hired)

    def warm(self, homes: Collection[Site]) -> None:
        """Have a spare on each of these nodes from now on."""
        self._spares |= {home: self._make_spare(home) for home in homes}

    def take(self, name: str, home: Site) -> Any:
        """Return an actor for a role: the one made for it, or else a spare."""
        if (first := self._hired.pop(name, None)) is not None:
            return first
        spare = self._spares.get(home)
        if spare is None or not _alive(spare):
            spare = self._make_spare(home)
        self._spares[home] = self._make_spare(home)
        return spare

    def dismiss(self) -> None:
        """End those that have become no role."""
        for actor in [*self._hired.values(), *self._spares.values()]:
            ray.kill(actor)

    def _make_spare(self, home: Site) -> Any:
        self._made += 1
        return self._make(f"spare-{self._made}", home, 0.0)  # it gets the CPUs of the dead

    def _make(self, name: str, home: Site, cpus: float) -> Any:
        return _actor(RoleActor, name, self._namespace, home, cpus).remote(self._modules, sys.path)


def _actor(cls: type[Any], name: str, namespace: str, home: Site, cpus: float) -> Any:
    options = {"name": name, "namespace": namespace, "num_cpus": cpus, "max_restarts": 0, "max_task_retries": 0}
    return ray.remote(cls).options(**options, max_concurrency=_CALLS, scheduling_strategy=ray_cluster.on(home))


def _alive(actor: Any) -> bool:
    try:
        insist(actor.ready, patience_s=_WARM_S)
    except GetTimeoutError:
        return True  # it still imports, as a new one would
    except RayError:
        return False
    return True


class _Keepers:
    """The keepers of all nodes, where there are several; the driver is that of its own node, and kills there itself."""

    def __init__(self) -> None:
        self._actors: dict[Site, Any] = {}
        self._attending: dict[Any, Site] = {}

    def begin(self, graph: Graph, nodes: list[Site], folder: Path, drawn: Map) -> dict[Site, Path]:
        """Make the keepers and the edges of their nodes; returns where these are."""
        namespace = f"qfleet-{secrets.token_hex(4)}"
        for site in nodes:
            own = folder if site is nodes[0] else None
            name = f"keeper-{self.index(site)}"
            self._actors[site] = _actor(Keeper, name, namespace, site, 0.0).remote(own)
        for site in nodes:
            self._attend(site)
        edges, by_id = dataclasses.replace(graph, nodes=[]), {site.id: keeper for site, keeper in self._actors.items()}
        for site in nodes[1:]:
            insist(self._actors[site].lay_out, edges, drawn.edges[site.id])
        for site, keeper in self._actors.items():
            insist(keeper.begin, site.id, by_id, drawn.imports[site.id], drawn.exports[site.id])
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
            except ActorDiedError:
                lost.append(site)
            except RayError:
                self._attend(site)
        return lost

    def _attend(self, site: Site) -> None:
        self._attending[self._actors[site].attend.remote()] = site

    def index(self, site: Site) -> int:
        """Return the number of a node."""
        return list({**self._actors, site: None}).index(site)

    def kill(self, home: Site, pid: int) -> None:
        """End a process of a node, and what it has started."""
        if home in list(self._actors)[1:]:
            with contextlib.suppress(RayError):  # with its node it is dead
                insist(self._actors[home].kill, pid, patience_s=_STOP_S)
        else:
            end_process(pid)

    def close(self) -> None:
        """End all of them."""
        for keeper in self._actors.values():
            with contextlib.suppress(RayError):
                insist(keeper.close, patience_s=_STOP_S)
            ray.kill(keeper)
