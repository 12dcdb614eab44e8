"""The placement for many machines: a Ray actor on each has the roles there as children, and all are watched here.

Ray places, starts and ends processes, and carries what goes from node to node. It restarts nothing: a rebuilt empty
actor is worse than a death, which is repaired here as in `processes`. Only the files `ray*.py` of this folder name ray.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Unpack

from qfleet.core.errors import ConfigError, MissingExtra, RoleFailure
from qfleet.core.types import Notice

try:
    import ray
    from ray import cloudpickle
except ImportError as error:
    raise MissingExtra("ray", "ray", "the placement 'ray'") from error

from qfleet.runtime import ray_cluster
from qfleet.runtime.channels import Ports, StreamLevels, lay_out
from qfleet.runtime.child import RoleSetup
from qfleet.runtime.children import end_process
from qfleet.runtime.crossings import draw_map
from qfleet.runtime.graph import Graph, Node
from qfleet.runtime.held_back import held_back
from qfleet.runtime.meeting import MeetingPlace
from qfleet.runtime.memory import RunFolder
from qfleet.runtime.ray_cluster import Site
from qfleet.runtime.ray_keepers import Keepers
from qfleet.runtime.ray_life import RoleLife
from qfleet.runtime.ray_places import Grounds, settle_down
from qfleet.runtime.ray_roaming import RoamingPlacement
from qfleet.runtime.ray_stewards import Stewards
from qfleet.runtime.ray_watch import ClusterWatch
from qfleet.runtime.reviving import Revival
from qfleet.runtime.supervisor import Member
from qfleet.runtime.worker import OpenEnds

_SILENCE_S = 0.5
"""How long a node that does not answer is left alone before roles are begun there again."""


class RayPlacement(RoamingPlacement):
    """Runs each node of a graph in its own process, on the cluster at `address`, or on this machine if None.

    Kinds in `anywhere` may be on any node of the cluster, all others are on this one. Where nodes besides this one are
    used, `rehearsal` must succeed there first, and their object stores must hold `in_flight` bytes. Kinds in `spawn`
    must not be forked. `threads` gives the threads of torch and OpenMP by kind, one where not given; kinds in
    `background` leave a core to any other. Roles in `away` are not begun yet, those of kinds in `shared` are in so many
    processes. Those of kinds in `expendable` may be lost with their node: the run goes on without them. Roles in
    `on_gpus` get a GPU, or a part of one, and are spawned; those of kinds in `anywhere` are only where there are
    `needs`. The autoscaler of a cluster that was joined is asked for room for `wanted` of them, besides the others. Of
    groups whose kinds are in `across` all but the first role may be on other nodes, where this one has no room, and in
    their next lives elsewhere when their node is lost. `tell_cpus` is told, before any role begins, how many CPUs the
    cluster has.
    """

    name = "ray"

    def __init__(
        self,
        graph: Graph,
        address: str | None = None,
        spawn: Collection[str] = (),
        threads: Mapping[str, int] | None = None,
        background: Collection[str] = (),
        anywhere: Collection[str] = (),
        rehearsal: Callable[[], Any] | None = None,
        in_flight: float = 0.0,
        away: Collection[str] = (),
        shared: Mapping[str, int] | None = None,
        expendable: Collection[str] = (),
        on_gpus: Collection[str] = (),
        needs: Mapping[str, float] | None = None,
        wanted: int = 0,
        across: Collection[str] = (),
        tell_cpus: Callable[[float], object] = lambda cpus: None,
        **revival: Unpack[Revival],
    ) -> None:
        super().__init__(graph, away, shared, **revival)
        self._across, self._on_gpus = set(across), set(on_gpus)
        self._meeting: MeetingPlace | None = None
        """Where a group meets that is on several nodes; None where none is."""
        self._payloads = {node.name: packed(node) for node in graph.nodes}
        self._graph, self._expendable, self._needs = graph, set(expendable), needs or {}
        with held_back() as held:  # a Ray whose start is cut short leaves processes behind that nobody knows
            self._owns_ray = ray_cluster.connect(address)
            self._helpers = ray_cluster.helpers() if self._owns_ray else []
            self._cluster = ClusterWatch()
            self._folder = RunFolder()
            self._keepers = [Keepers()]
            self._stewards = Stewards(sorted({node.build.__module__ for node in graph.nodes}), self._kill)
            self._setups = {}
            self._carrying = self._asked = False
            atexit.register(self.close)  # before Ray's own handler
        try:
            held.deliver()
            if address is not None and wanted:
                self._ask_for(wanted, sum(node.kind not in anywhere for node in graph.nodes))
            nodes = self._cluster.sites()
            self._grounds = Grounds(rehearsal, in_flight)
            there = [node for node in graph.nodes if node.name not in {*self._away, *self._guests}]
            dealt = settle_down(there, anywhere, self._across, nodes, self._needs, self._on_gpus)
            self._homes = dict.fromkeys(self._nodes, nodes[0]) | dealt
            self._here, *others = dict.fromkeys([nodes[0], *self._homes.values()])
            self._grounds.require(others)
            tell_cpus(ray.cluster_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]
            homes = {member.name: self._homes[member.name] for member in self.crew}
            gpus = ray_cluster.gpu_shares({name: home for name, home in self._homes.items() if name in self._on_gpus})
            roaming = {node.name: self._needs for node in graph.nodes if node.kind in anywhere}
            self._stewards.hire(homes, ray_cluster.cpu_shares(homes.values()), gpus, roaming)
            spawned = {node.name for node in graph.nodes if node.kind in spawn or node.name in self._on_gpus}
            self._set_up(self._lay_out(graph, others), threads or {}, background, spawned)
            self._mark_away()
            self._lives |= {name: self._begin(name) for name in homes}
            self._await("built")
        except BaseException:
            self.close()
            raise

    def _ask_for(self, wanted: int, others: int) -> None:
        """Ask the cluster for room for so many roles that may be anywhere, and for the others."""
        self._asked = True
        ray_cluster.ask_for([{"CPU": 1.0, **self._needs}] * wanted + [{"CPU": 1.0}] * others)
        each = "".join(f" and {amount:g} {name}" for name, amount in self._needs.items())
        text = f"the autoscaler, if there is one, is asked for {others} CPUs and {wanted} times 1 CPU{each}"
        self._incidents.append(Notice("supervisor", 0, "asked", text))

    def _set_up(
        self,
        folders: Mapping[Site, Path],
        threads: Mapping[str, int],
        background: Collection[str],
        spawned: Collection[str],
    ) -> None:
        """Note what each role is told at its birth."""
        for node in self._graph.nodes:
            folder = folders[self._homes[node.name]]
            ports = self._ports[node.name] = Ports(folder)
            count, behind = threads.get(node.kind, 1), node.kind in background
            last_words = folder / f"{node.name}.last_words"
            method = "spawn" if node.name in spawned else "forkserver"
            self._setups[node.name] = RoleSetup(node.name, (), ports, method, count, behind, last_words)

    def _lay_out(self, graph: Graph, others: list[Site]) -> dict[Site, Path]:
        """Make all edges; returns where those of each node are."""
        lay_out(graph, self._folder.path)
        self._levels = StreamLevels(graph, self._folder.path)
        self._ends = OpenEnds(Ports(self._folder.path, hold=False).open)
        if not others:
            return {self._here: self._folder.path}
        homes = {name: site.id for name, site in self._homes.items()}
        drawn = draw_map(graph, homes, self._here.id)
        return self._keepers[0].begin(graph, [self._here, *others], self._folder.path, drawn)

    def advance(self) -> None:
        """Hear from the roles, as every placement does; what goes from node to node goes on from the first time on."""
        self._require_ray()
        if not self._carrying:
            self._carrying = True
            self._ask_keepers("carry")
        super().advance()

    def pause(self) -> None:
        """Stop all roles between two steps, and have everything arrive that they sent."""
        super().pause()
        for _ in range(2):  # what came to this node in the first round goes on in the second
            self._ask_keepers("settle")

    def _reached(self, member: Member) -> bool:
        life = self._lives.get(member.name)
        return not isinstance(life, RoleLife) or life.line.reached

    def _begin(self, name: str) -> RoleLife:
        if self._nodes[name].kind in self._across:
            self._ports[name].meeting = self._meet(name)
        payloads = tuple(self._payloads[node.name] for node in self._housed(name))
        setup = dataclasses.replace(self._setups[name], payloads=payloads)
        return RoleLife(self._stewards.line(name, self._homes[name]), setup.birth())

    def _meet(self, name: str) -> str:
        """Return where a role's group meets; empty where all of it is on this node, so that nothing listens beyond."""
        if all(self._homes[other] == self._here for other in self._groups.of(name)):
            self._meeting = None
            return ""
        if self._meeting is None:
            self._meeting = MeetingPlace(self._here.address)
            text = (
                f"ranks on several nodes meet at {self._meeting.address}, and sum their gradients without encryption or"
                " a password: this needs a network where nobody else is"
            )
            self._incidents.append(Notice("supervisor", 0, "network", text))
        return f"{self._meeting.address}/{self._nodes[name].kind}"

    def _begin_due(self) -> list[Member]:
        """Begin the dead anew, but none on a node that does not answer: it is lost, or answers again.

        Nor those who need a new steward while the head is silent, who would have to make it.
        """
        now = time.monotonic()
        due = {name for name, at in self._due.items() if now >= at}
        hindered = {name for name in due if not self._can_begin(name)}
        for name in due:
            if hindered.intersection(self._groups.of(name)):
                self._due[name] = now + _SILENCE_S
        return super()._begin_due()

    def _can_begin(self, name: str) -> bool:
        home = self._homes[name]
        return self._answers(home) and (not self._cluster.silent or self._stewards.has(name, home))

    def _answers(self, site: Site) -> bool:
        keepers = [one for one in self._keepers if one.has(site)]
        return site == self._here or any(one.answers(site) for one in keepers)

    def _kill(self, home: Site, pid: int) -> None:
        """End a process of a node; with a node that is lost it is dead."""
        if home == self._here:
            end_process(pid)
        elif (keepers := next((one for one in self._keepers if one.has(home)), None)) is not None:
            keepers.kill(home, pid)

    def _require_ray(self) -> None:
        """End the run where its Ray has ended: nothing could be begun any more."""
        if not self._closed and (ended := self._cluster.ended):
            self.close()
            cause = f"{ended}; the run is saved as of its last checkpoint: go on with `qfleet resume RUN`"
            raise RoleFailure("node", 0, cause, died=True)

    def _wait_for_news(self, seconds: float) -> None:
        self._require_ray()
        attended = [call for keepers in self._keepers for call in keepers.attended()]
        calls = [*attended, *(call for line in self._stewards.lines() for call in line.waitables())]
        if not calls:
            time.sleep(seconds)
            return
        ready, _ = ray.wait(calls, timeout=seconds)
        for line in self._stewards.lines():
            line.listen()
        for lost in dict.fromkeys(site for keepers in self._keepers for site in keepers.lost(ready)):
            self._lose(lost)

    def _end(self) -> None:
        atexit.unregister(self.close)
        if not ray.is_initialized():  # all has ended with it, and to ask would start another one
            self._cluster.close()
            self._folder.remove()
            return
        if self._cluster.ended:
            self._end_without_ray()
            return
        self._end_lives()
        self._stewards.dismiss()
        for keepers in self._keepers:
            keepers.close()
        self._folder.remove()
        if self._asked and not self._cluster.silent:  # a request ends with its cluster, too
            ray_cluster.ask_for([])
        self._cluster.close()
        if self._owns_ray:
            ray_cluster.stop_local()

    def _end_without_ray(self) -> None:
        """End what is on this machine by the system's hand: Ray would be asked in vain. All else ends with its node."""
        for pid in [life.pid for name, life in self._lives.items() if self._homes[name] == self._here]:
            if pid:
                end_process(pid)
        for pid in self._stewards.pids(self._here):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it alone: its forkserver then removes what it left
        self._folder.remove()
        self._cluster.close()
        if self._owns_ray:
            ray_cluster.bury_local(self._helpers)


def packed(node: Node) -> bytes:
    """Return a node as bytes, with the classes and functions that others could not import."""
    try:
        found: bytes = cloudpickle.dumps(node)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigError(
            f"{node.name} cannot be sent to another process ({error}): run with --placement inline"
        ) from error
    return found
