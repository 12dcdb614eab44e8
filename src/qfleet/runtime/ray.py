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
from qfleet.core.protocols import Report

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
except ImportError as error:
    raise MissingExtra("ray", "ray", "the placement 'ray'") from error

from qfleet.runtime import ray_cluster
from qfleet.runtime.channels import Ports, StreamLevels, lay_out
from qfleet.runtime.crossings import Map, draw_map
from qfleet.runtime.graph import Graph, Node
from qfleet.runtime.memory import RunFolder
from qfleet.runtime.ray_actors import PATIENCE_S, Keeper, RoleActor, RoleSetup, Said, end_process
from qfleet.runtime.ray_cluster import Site
from qfleet.runtime.reviving import Revival, RevivingPlacement
from qfleet.runtime.worker import Answer, Command, OpenEnds, last_words

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
                self._ports[node.name] = Ports(folder)
                self._setups[node.name] = RoleSetup(
                    node.name, payloads[node.name], self._ports[node.name], (threads or {}).get(node.kind, 1),
                    node.kind in background, folder / f"{node.name}.last_words", failpoints.wanted(),
                )  # fmt: skip
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

    def _begin(self, name: str) -> _Life:
        home = self._homes[name]
        return _Life(self._hands.take(name, home), self._setups[name], lambda pid: self._keepers.kill(home, pid))

    def _wait_for_news(self, seconds: float) -> None:
        attended = self._keepers.attended()
        calls = [*attended, *(call for life in self._lives.values() for call in life.waitables())]
        if not calls:
            time.sleep(seconds)
            return
        ready, _ = ray.wait(calls, timeout=seconds)
        if lost := [site for call, site in attended.items() if call in ready]:
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
        ray.get(actor.ready.remote(), timeout=_WARM_S)
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
        self._attending = {keeper.attend.remote(): site for site, keeper in self._actors.items()}
        edges, by_id = dataclasses.replace(graph, nodes=[]), {site.id: keeper for site, keeper in self._actors.items()}
        ray.get([self._actors[site].lay_out.remote(edges, drawn.edges[site.id]) for site in nodes[1:]])
        ray.get(
            [
                keeper.begin.remote(site.id, by_id, drawn.imports[site.id], drawn.exports[site.id])
                for site, keeper in self._actors.items()
            ]
        )
        return {site: ray.get(keeper.folder.remote()) for site, keeper in self._actors.items()}

    def ask(self, method: str) -> None:
        """Have all keepers do something, and wait for it; one that is lost is noticed by whoever listens."""
        with contextlib.suppress(RayError):
            ray.get([getattr(keeper, method).remote() for keeper in self._actors.values()])

    def attended(self) -> dict[Any, Site]:
        """Return calls that end when a node is lost."""
        return self._attending

    def index(self, site: Site) -> int:
        """Return the number of a node."""
        return list({**self._actors, site: None}).index(site)

    def kill(self, home: Site, pid: int) -> None:
        """End a process of a node, and what it has started."""
        if home in list(self._actors)[1:]:
            self._actors[home].kill.remote(pid)
        else:
            end_process(pid)

    def close(self) -> None:
        """End all of them."""
        if closing := [keeper.close.remote() for keeper in self._actors.values()]:
            ray.wait(closing, num_returns=len(closing), timeout=_STOP_S)
        for keeper in self._actors.values():
            ray.kill(keeper)


class _Life:
    """One life of a role in an actor, as the driver holds it."""

    def __init__(self, actor: Any, setup: RoleSetup, kill: Callable[[int], None]) -> None:
        self.actor, self.pid = actor, 0
        self._setup, self._kill = setup, kill
        self._orders: list[tuple[Command, str]] = []
        self._obeyed = self._known = 0
        self._ended = False
        self._verdict = ""
        self._calls = [actor.live.remote(setup)]
        self._last = self._calls[0]
        """What ends when the role has closed, or its actor."""
        self._call()

    def _call(self) -> None:
        orders = dict(enumerate(self._orders[self._obeyed :], self._obeyed))
        self._newest = self.actor.talk.remote(orders, self._known, PATIENCE_S)
        self._calls.append(self._newest)

    def tell(self, command: Command, argument: str) -> None:
        """Send a command; that it is dead is noticed by `hear`."""
        self._orders.append((command, argument))
        self._call()

    def waitables(self) -> list[Any]:
        """Return the calls that are with the actor."""
        return [] if self._ended else list(self._calls)

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
        self._ended = self._ended or any(isinstance(item, Answer) and item.what == "failed" for item in heard)
        if self._newest in ready and not self._ended:
            self._call()
        return heard

    def _understood(self, said: Said | None) -> list[Answer | Report]:
        """Return what is new in what was said."""
        if said is None:
            return []
        self.pid, self._obeyed = said.pid, max(self._obeyed, said.obeyed)
        fresh = said.answers[self._known - said.first :]
        self._known += len(fresh)
        return [*([said.report] if said.report else []), *fresh]

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
        self._last = self.actor.finish.remote()

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
