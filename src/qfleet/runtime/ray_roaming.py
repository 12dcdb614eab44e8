"""What a placement on the nodes of a cluster does when roles come to a node, leave one, or lose theirs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from ray.exceptions import RayError

from qfleet.core.errors import ConfigError, RoleFailure
from qfleet.core.protocols import Machine
from qfleet.core.types import Notice
from qfleet.runtime.channels import edge_stem
from qfleet.runtime.child import RoleSetup
from qfleet.runtime.comings import ComingsPlacement
from qfleet.runtime.crossings import draw_map
from qfleet.runtime.graph import Graph, ends
from qfleet.runtime.memory import RunFolder, attach
from qfleet.runtime.ray_cluster import Site
from qfleet.runtime.ray_keepers import Keepers
from qfleet.runtime.ray_places import Grounds, rank_site
from qfleet.runtime.ray_stewards import Stewards
from qfleet.runtime.ray_watch import ClusterWatch
from qfleet.runtime.streams import catch_up, reopen
from qfleet.runtime.supervisor import Member


class RoamingPlacement(ComingsPlacement):
    """A placement whose roles may be on any node of a cluster; a subclass says how they begin there, and end."""

    _graph: Graph
    _folder: RunFolder
    _cluster: ClusterWatch
    _here: Site
    """This node."""
    _homes: dict[str, Site]
    """Where each role is, or was last."""
    _grounds: Grounds
    _keepers: list[Keepers]
    """Those of the nodes that were there first, then those of roles that came to other nodes."""
    _stewards: Stewards
    _setups: dict[str, RoleSetup]
    _needs: Mapping[str, float]
    """What a node must have for roles that may be anywhere."""
    _expendable: set[str]
    """Kinds whose roles may be lost with their node."""
    _across: set[str]
    """Kinds whose groups may be on several nodes."""
    _on_gpus: set[str]
    _carrying: bool
    """Whether keepers exchange what goes from node to node."""

    def machines(self) -> list[Machine]:
        """Return the nodes of the cluster that can have roles, the driver's first; none while its head is silent."""
        if self._cluster.silent:
            return []
        for name in self._away:
            self._vacated(name)  # a node that is to go must not wait for us
        going = self._cluster.draining()
        rooms = {site: min(site.cpus, site.room(self._needs)) for site in self._cluster.sites()}
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
        site = next((site for site in self._cluster.sites() if site.id == machine), None)
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
        going = self._cluster.draining()
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
        unfit, group = self._grounds.unfit | set(self._cluster.draining()), self._groups.of(name)
        sites = [self._here, *(site for site in self._cluster.sites() if site != self._here and site.id not in unfit)]
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

    def _ask_keepers(self, method: str) -> None:
        for keepers in self._keepers:
            keepers.ask(method)
