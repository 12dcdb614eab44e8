"""The placement for many machines: a Ray actor on each has the roles there as children, and all are watched here.

Ray places, starts and ends processes, and carries what goes from node to node. It restarts nothing: a rebuilt empty
actor is worse than a death, which is repaired here as in `processes`. Only the files `ray*.py` of this folder name ray.
"""

from __future__ import annotations

import atexit
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from qfleet.core.errors import ConfigError, MissingExtra, RoleFailure
from qfleet.core.protocols import Machine
from qfleet.core.types import Notice

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError
except ImportError as error:
    raise MissingExtra("ray", "ray", "the placement 'ray'") from error

from qfleet.runtime import ray_cluster
from qfleet.runtime.channels import Ports, StreamLevels, edge_stem, lay_out
from qfleet.runtime.child import RoleSetup
from qfleet.runtime.children import end_process
from qfleet.runtime.comings import ComingsPlacement
from qfleet.runtime.crossings import draw_map
from qfleet.runtime.graph import Graph, Node, ends
from qfleet.runtime.meeting import MeetingPlace
from qfleet.runtime.memory import RunFolder, attach
from qfleet.runtime.ray_cluster import Site
from qfleet.runtime.ray_keepers import Keepers
from qfleet.runtime.ray_life import RoleLife
from qfleet.runtime.ray_places import Grounds, rank_site, settle_down
from qfleet.runtime.ray_stewards import Stewards
from qfleet.runtime.reviving import Revival
from qfleet.runtime.streams import catch_up, reopen
from qfleet.runtime.supervisor import Member
from qfleet.runtime.worker import OpenEnds

_SILENCE_S = 0.5
"""How long a node that does not answer is left alone before roles are begun there again."""


class RayPlacement(ComingsPlacement):
    """Runs each node of a graph in its own process, on the cluster at `address`, or on this machine if None.

    Kinds in `anywhere` may be on any node of the cluster, all others are on this one. Where nodes besides this one are
    used, `rehearsal` must succeed there first, and their object stores must hold `in_flight` bytes. Kinds in `spawn`
    must not be forked. `threads` gives the threads of torch and OpenMP by kind, one where not given; kinds in
    `background` leave a core to any other. Roles in `away` are not begun yet, those of kinds in `shared` are in so many
    processes. Those of kinds in `expendable` may be lost with their node: the run goes on without them. Roles in
    `on_gpus` get a GPU, or a part of one, and are spawned; those of kinds in `anywhere` are only where there are
    `needs`. The autoscaler of a cluster that was joined is asked for room for `wanted` of them, besides the others. Of
    groups whose kinds are in `across` all but the first role may be on other nodes, where this one has no room, and in
    their next lives elsewhere when their node is lost.
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
        **revival: Unpack[Revival],
    ) -> None:
        super().__init__(graph, away, shared, **revival)
        self._across, self._on_gpus = set(across), set(on_gpus)
        self._meeting: MeetingPlace | None = None
        """Where a group meets that is on several nodes; None where none is."""
        self._payloads = {node.name: _payload(node) for node in graph.nodes}
        self._graph, self._expendable, self._needs = graph, set(expendable), needs or {}
        self._owns_ray = ray_cluster.connect(address)
        self._folder = RunFolder()
        self._keepers: list[Keepers] = [Keepers()]
        """Those of the nodes that were there first, then those of roles that came to other nodes."""
        self._stewards = Stewards(sorted({node.build.__module__ for node in graph.nodes}), self._kill)
        self._setups: dict[str, RoleSetup] = {}
        self._carrying = self._asked = False
        atexit.register(self.close)  # before Ray's own handler
        try:
            if address is not None and wanted:
                self._ask_for(wanted, sum(node.kind not in anywhere for node in graph.nodes))
            nodes = ray_cluster.sites()
            self._grounds = Grounds(rehearsal, in_flight)
            there = [node for node in graph.nodes if node.name not in {*self._away, *self._guests}]
            dealt = settle_down(there, anywhere, self._across, nodes, self._needs, self._on_gpus)
            self._homes = dict.fromkeys(self._nodes, nodes[0]) | dealt
            self._here, *others = dict.fromkeys([nodes[0], *self._homes.values()])
            self._grounds.require(others)
            self._warn_of_crowd(ray.cluster_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]
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
        if not self._carrying:
            self._carrying = True
            self._ask_keepers("carry")
        super().advance()

    def pause(self) -> None:
        """Stop all roles between two steps, and have everything arrive that they sent."""
        super().pause()
        for _ in range(2):  # what came to this node in the first round goes on in the second
            self._ask_keepers("settle")

    def _ask_keepers(self, method: str) -> None:
        for keepers in self._keepers:
            keepers.ask(method)

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
        """Begin the dead anew, but none on a node that does not answer: it is lost, or answers again."""
        now = time.monotonic()
        due = {name for name, at in self._due.items() if now >= at}
        silent = {site for site in {self._homes[name] for name in due} if not self._answers(site)}
        for name in due:
            if any(self._homes[other] in silent for other in self._groups.of(name)):
                self._due[name] = now + _SILENCE_S
        return super()._begin_due()

    def _answers(self, site: Site) -> bool:
        keepers = [one for one in self._keepers if one.has(site)]
        return site == self._here or any(one.answers(site) for one in keepers)

    def _kill(self, home: Site, pid: int) -> None:
        """End a process of a node; with a node that is lost it is dead."""
        if home == self._here:
            end_process(pid)
        elif (keepers := next((one for one in self._keepers if one.has(home)), None)) is not None:
            keepers.kill(home, pid)

    def _wait_for_news(self, seconds: float) -> None:
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

    # ------------------------------------------------------------------ nodes that come and go

    def machines(self) -> list[Machine]:
        """Return the nodes of the cluster that can have roles, the driver's first."""
        for name in self._away:
            self._vacated(name)  # a node that is to go must not wait for us
        going = ray_cluster.draining()
        rooms = {site: min(site.cpus, site.room(self._needs)) for site in ray_cluster.sites()}
        fit = {site: room for site, room in rooms.items() if site.id not in self._grounds.unfit}
        return [Machine(site.id, site.name, room, going.get(site.id, "")) for site, room in fit.items()]

    def home(self, name: str) -> str:
        """Return the id of the node where a role is, or was last."""
        return self._homes[name].id

    def absent(self, kind: str) -> list[int]:
        """Return the indices of a kind's roles that could come now: nothing of what they sent is on its way."""
        return [index for index in super().absent(kind) if self._vacated(f"{kind}-{index}")]

    def come(self, kind: str, indices: Sequence[int], machine: str) -> bool:
        """Begin roles that are away on a node; returns False where that cannot be."""
        site = next((site for site in ray_cluster.sites() if site.id == machine), None)
        over = any(member.done for member in self.crew if member.report.kind == kind)
        if site is None or over:
            return False
        return self._house([f"{kind}-{index}" for index in indices], site) and super().come(kind, indices, machine)

    def _fit(self, site: Site) -> bool:
        """Return whether a node has what a run needs; one that lacks something is named."""
        if site.id in self._grounds.unfit:
            return False
        try:
            self._grounds.require([site] if site != self._here else [])
        except ConfigError as error:
            self._grounds.unfit.add(site.id)
            self._incidents.append(Notice("supervisor", 0, "unfit", f"{error}; the run goes on without that node"))
            return False
        except RayError:
            self._grounds.unfit.add(site.id)
            return False
        return True

    def _house(self, names: Sequence[str], site: Site) -> bool:
        """Make the edges of roles on a node where they are to be; returns False if it is not fit, or lost meanwhile."""
        if not self._fit(site):
            return False
        folder = self._folder.path
        self._let_go(names)
        inlets = [end.edge for name in names for end in ends(self._nodes[name].handles) if end.side == "receiver"]
        begun = {edge: reopen(edge_stem(folder, edge)) for edge in inlets}
        if site != self._here:
            keepers = Keepers()
            try:
                folder = self._open_up(keepers, names, site, begun)
            except RayError:
                self._grounds.unfit.add(site.id)
                keepers.close()
                return False
            self._keepers.append(keepers)
        for name in names:
            self._homes[name] = site
            last_words = folder / f"{name}.last_words"
            self._setups[name] = dataclasses.replace(self._setups[name], last_words=last_words)
        return True

    def _let_go(self, names: Sequence[str]) -> None:
        """Have the keepers that these roles had exchange nothing more of what is theirs."""
        edges = [end.edge for name in names for end in ends(self._nodes[name].handles)]
        for former in self._keepers:
            former.let_go(self._here, edges)

    def _open_up(self, keepers: Keepers, names: Sequence[str], site: Site, begun: Mapping[str, int]) -> Path:
        """Have keepers make the edges of these roles on another node; returns where they are.

        What goes there begins with the messages whose numbers are in `begun`.
        """
        homes = {name: site.id if name in names else self._here.id for name in self._nodes}
        drawn = draw_map(self._graph, homes, self._here.id)
        folder = keepers.begin(self._graph, [self._here, site], self._folder.path, drawn, begun)[site]
        stems = {edge: edge_stem(self._folder.path, edge) for edge in self._graph.counters}
        keepers.seed(site, {edge: attach(stem).view(np.int64).tolist() for edge, stem in stems.items()})
        if self._carrying:
            keepers.ask("carry")
        return folder

    def _settle(self, name: str, machine: str) -> None:
        self._ports[name].folder = self._setups[name].last_words.parent

    def _lodge(self, names: Sequence[str]) -> None:
        """Find places for the roles of a group: where their edges are, or where there is room if that node is to go.

        Who comes and has no edges anywhere else goes where there is room, too.
        """
        self._ask_keepers("settle")
        going = ray_cluster.draining()
        for name in names:
            home = self._homes[name]
            homeless = name in self._away if home == self._here else home.id in going
            site = self._room_for(name) if homeless and self._nodes[name].kind in self._across else home
            if site is None:  # a part of this node's GPUs is kept for those who come, and for nobody else
                site = home if name in self._on_gpus else self._here
            if homeless and site.id not in going:  # a node that is to go takes nobody, but keeps who is there
                self._house_rank(name, site)
                self._dissolve(home)
            else:
                self._settle(name, home.id)

    def _room_for(self, name: str) -> Site | None:
        """Return a node that has room for a role of a group; None if none has."""
        unfit, group = self._grounds.unfit | set(ray_cluster.draining()), self._groups.of(name)
        sites = [self._here, *(site for site in ray_cluster.sites() if site != self._here and site.id not in unfit)]
        coming = [other for other in group[: group.index(name)] if other in self._away]  # they have their places
        there = [*(member.name for member in self.crew if member.name != name), *coming]
        ranks = [other for other in there if self._nodes[other].kind == self._nodes[name].kind]
        roles, beside = (Counter(self._homes[other] for other in some) for some in (there, ranks))
        return rank_site(sites, roles, beside, name in self._on_gpus)

    def _house_rank(self, name: str, site: Site) -> None:
        """Let a role of a group be on a node from its next life on, or on this one if that cannot be."""
        if not self._house([name], site):
            self._house([name], self._here)
        self._settle(name, self._homes[name].id)

    def _vacated(self, name: str) -> bool:
        """Return whether nothing of a role that is away is on its way any more; its keepers may then go."""
        site = self._homes[name]
        sent = [end.edge for end in ends(self._nodes[name].handles) if end.side == "sender"]
        for keepers in [one for one in self._keepers if one.has(site)] if site != self._here else []:
            if not keepers.vacated(site, keepers.laid_out(site, sent)):
                return False
        self._homes[name] = self._here
        self._dissolve(site)
        return True

    def _dissolve(self, site: Site) -> None:
        """Give a node back that no role is on any more."""
        if site != self._here and site not in self._homes.values():
            for keepers in [one for one in self._keepers if one.has(site)]:
                keepers.leave(site)
            self._stewards.forget(site)
            self._dismiss_keepers()

    def _dismiss_keepers(self) -> None:
        """End those on this node whose counterparts elsewhere are gone."""
        for keepers in self._keepers[1:]:
            if not keepers.abroad:
                keepers.close()
                self._keepers.remove(keepers)

    def _lose(self, site: Site) -> None:
        """Go on without the roles of a lost node, or end the run where it cannot do without them."""
        there = [name for name, home in self._homes.items() if home == site and name in self._nodes]
        living = [member for member in self.crew if member.name in there]
        if site == self._here or any(member.report.kind not in self._expendable | self._across for member in living):
            number = self._keepers[0].index(site)
            self.close()
            cause = f"{site.name} was lost with what its roles kept: `qfleet resume` goes on from the last checkpoint"
            raise RoleFailure("node", number, cause, died=True)
        if living:
            names = ", ".join(member.name for member in living)
            self._incidents.append(Notice("supervisor", 0, "node_lost", f"{site.name} was lost, with {names}"))
        self._grounds.unfit.add(site.id)
        for keepers in self._keepers:
            keepers.forget(site)
        self._dismiss_keepers()
        for member in living:
            if member.report.kind in self._across and member.name not in self._leaving:
                self._move(member, site)
                continue
            self._leaving.add(member.name)
            if member.name in self._lives:
                self._lives[member.name].condemn(f"{site.name} was lost")
            else:
                self._due.pop(member.name, None)
                self._leave(member)
        self._stewards.forget(site)

    def _move(self, member: Member, lost: Site) -> None:
        """Let a role of a group, whose node was lost, be on another one from its next life on."""
        site = self._room_for(member.name)
        if site is None and member.name in self._on_gpus:
            self.close()
            cause = (
                f"{lost.name} was lost, and no other node has a GPU for it: `qfleet resume` goes on from the last"
                " checkpoint, with --learners as many as there are GPUs"
            )
            raise RoleFailure(member.report.kind, member.report.index, cause, died=True)
        self._let_go([member.name])
        first = self._nodes[self._groups.of(member.name)[0]]
        for own, peer in zip(self._inlets(self._nodes[member.name]), self._inlets(first), strict=True):
            catch_up(own, peer)  # else its streams may seem full of what all have learned from, and nothing comes
        self._house_rank(member.name, site or self._here)
        if member.name in self._lives:
            self._lives[member.name].condemn(f"{lost.name} was lost")

    def _end(self) -> None:
        atexit.unregister(self.close)
        if not ray.is_initialized():  # all has ended with it, and to ask would start another one
            self._folder.remove()
            return
        self._end_lives()
        self._stewards.dismiss()
        for keepers in self._keepers:
            keepers.close()
        self._folder.remove()
        if self._asked:
            ray_cluster.ask_for([])
        if self._owns_ray:
            ray_cluster.stop_local()


def _payload(node: Node) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(node)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigError(
            f"{node.name} cannot be sent to another process ({error}): run with --placement inline"
        ) from error
    return packed
