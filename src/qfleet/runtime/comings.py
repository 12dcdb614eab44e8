"""What placements do alike whose roles come and go while the run lasts, because the run wants it so.

A run is drawn with all roles that it may ever have. Those that are away have no process; their edges wait for them.
Roles of some kinds share processes, the number of which changes: none of these is ever away.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Unpack

from qfleet.core.protocols import Machine, Report
from qfleet.core.role import Idle
from qfleet.runtime import checkpoint, edgestates
from qfleet.runtime.answers import Answer
from qfleet.runtime.captured import Captured
from qfleet.runtime.channels import edge_stem
from qfleet.runtime.graph import Graph, Node, ends, open_handles
from qfleet.runtime.memory import RunFolder
from qfleet.runtime.reviving import Revival, RevivingPlacement, end_all, kill_all
from qfleet.runtime.streams import desert, hold
from qfleet.runtime.supervisor import Member
from qfleet.runtime.worker import OpenEnds

_DRAIN_S = 30.0
"""How long a group may take to use up what was sent to it before it is formed anew."""
_PARTING_S = 10.0
"""How long a role may take to leave before it is killed."""
_STUCK_S = 0.2
"""How long nothing may have moved before one more message is let through to a group that is to be formed anew."""
_ROUNDS = 100
"""Steps in which a paused role comes to rest."""
_AWAY = "away"
"""The name under which a checkpoint says how many lives there were."""


class ComingsPlacement(RevivingPlacement):
    """A placement whose roles come and go; a subclass says where they can be.

    `shared` names kinds whose roles share processes, and in how many they are at first.
    """

    _folder: RunFolder
    """This machine's. Whoever sends to a role that may be away, or to one of a group, is on this machine."""

    def __init__(
        self,
        graph: Graph,
        away: Collection[str] = (),
        shared: Mapping[str, int] | None = None,
        **revival: Unpack[Revival],
    ) -> None:
        super().__init__(graph, **revival)
        self._shared = dict(shared or {})
        """In how many processes the roles of a kind are: each has every so manieth of them."""
        self._away = {member.name: member for member in self.crew if member.name in away}
        self._guests = {member.name: member for member in self.crew if self._host_of(member.name) != member.name}
        """Roles that are in another one's process."""
        self.crew = [member for member in self.crew if not {member.name} & {*away, *self._guests}]
        self._together = set(revival.get("groups", ()))
        for kind in self._together:
            self._groups.form(kind, [member.name for member in self.crew if member.report.kind == kind])
        self._former_lives = 0
        """How often any role was begun anew before the run was resumed, at most."""
        self._deadlines: dict[str, float] = {}
        """When those are killed who were asked to leave."""

    def _mark_away(self) -> None:
        """Let those who send to roles that are away, and the groups of these, know it; before the first lives."""
        for name, member in self._away.items():
            self._desert(self._nodes[name])
            for other in self._members(member.report.kind) if member.report.kind in self._together else ():
                self._ports[other.name].gone += 1

    @abstractmethod
    def machines(self) -> list[Machine]:
        """Return where roles can be, this machine first."""

    @abstractmethod
    def home(self, name: str) -> str:
        """Return the id of the machine where a role is, or was last."""

    @abstractmethod
    def _settle(self, name: str, machine: str) -> None:
        """Prepare a role's next life on a machine."""

    @abstractmethod
    def _lodge(self, names: Sequence[str]) -> None:
        """Find places for the roles of a group that is formed anew: those that come, and those that must move."""

    def present(self, kind: str) -> list[int]:
        """Return the indices of a kind's roles that are there and stay, in order."""
        staying = [member for member in self.crew if member.name not in self._leaving]
        return sorted(member.report.index for member in staying if member.report.kind == kind)

    def absent(self, kind: str) -> list[int]:
        """Return the indices of a kind's roles that could come now, in order."""
        return sorted(member.report.index for member in self._away.values() if member.report.kind == kind)

    def come(self, kind: str, indices: Sequence[int], machine: str) -> bool:
        """Begin roles that are away; returns False where their kind has come to its end."""
        if any(member.done for member in self.crew if member.report.kind == kind):
            return False
        for index in indices:
            self._come(self._away[f"{kind}-{index}"], machine)
        return True

    def go(self, kind: str, indices: Sequence[int]) -> None:
        """Have roles close between two steps and be away from then on; they are not begun anew."""
        for index in indices:
            name = f"{kind}-{index}"
            self._leaving.add(name)
            self._deadlines[name] = time.monotonic() + _PARTING_S
            if name in self._lives:
                self._lives[name].stop()
            else:  # it is dead, and was to be begun anew
                del self._due[name]
                self._leave(next(member for member in self.crew if member.name == name))

    def share(self, kind: str, size: int) -> str:
        """Have the roles of a kind in `size` processes from their next step on; what they keep goes with them.

        Their processes end between two steps, as by a death, and others begin; only they stand still meanwhile. Returns
        why that cannot be done now; empty if it was.
        """
        members = self._members(kind)
        if self._running:
            self._ask("pause", members)
        if hindrance := _hindrance(members):
            self._let_run(members)
            return hindrance
        kill_all([self._lives.pop(member.name) for member in members])
        all_of_them = [*members, *(guest for guest in self._guests.values() if guest.report.kind == kind)]
        life = max(self._ports[member.name].life for member in all_of_them) + 1
        self._shared[kind] = size
        for member in all_of_them:
            self._ports[member.name].life, self._ports[member.name].planned = life, True
            if self._host_of(member.name) == member.name:
                member.life += self._guests.pop(member.name, None) is None
                self._enter(member)
            elif member in self.crew:
                self.crew.remove(member)
                self._guests[member.name] = member
        self._let_run(self._members(kind))
        self._await("built", self._members(kind))
        return ""

    def _let_run(self, members: Sequence[Member]) -> None:
        """Let roles go on, if the others do."""
        for member in members if self._running else ():
            self._tell(member, "run", "")

    def _host_of(self, name: str) -> str:
        """Return the name of the role whose process a role is in: usually its own."""
        node = self._nodes[name]
        size = self._shared.get(node.kind)
        return name if size is None else f"{node.kind}-{node.index % size}"

    def _housed(self, name: str) -> list[Node]:
        """Return the roles that are in a role's process, itself first."""
        return [node for node in self._nodes.values() if self._host_of(node.name) == name]

    def regroup(self, kind: str, size: int, rest: str) -> str:
        """Let the first `size` roles of a kind be its group, from their next step on; nothing they were sent is lost.

        What is on its way to them is used up first: `rest` is the reason for which they are then idle. All roles stand
        still meanwhile. Returns why it cannot be done now; empty if it was.
        """
        held = [stem for node in self._of(kind) for stem in self._inlets(node)]
        for stem in held:
            hold(stem, 0)
        try:
            if not self._drained(kind):
                busy = f"the {kind}s have not used up what was sent to them within {_DRAIN_S:.0f} s"
                return _hindrance(self._members(kind)) or busy
            self.pause()
            if not self._at_rest(kind, rest):
                return _hindrance(self._members(kind)) or f"the {kind}s do not come to rest"
            members = self._members(kind)
            self._ask("part", members)
            if any(member.died_at is not None for member in members):  # they are begun anew, as after any death
                return _hindrance(members)
            end_all([self._lives.pop(member.name) for member in members])
            self._form(kind, size)
        finally:
            for stem in held:
                hold(stem, None)
        self._await("built", self._members(kind))
        return ""

    # ------------------------------------------------------------------ one by one

    def _come(self, member: Member, machine: str) -> None:
        del self._away[member.name]
        self._desert(self._nodes[member.name], False)
        self._settle(member.name, machine)
        ports = self._ports[member.name]
        if member.built or self._former_lives:  # perhaps it has lived before the run was resumed
            ports.life = max(ports.life, self._former_lives) + 1
        member.life += member.built
        self._enter(member)
        self._let_run([member])

    def _enter(self, member: Member) -> None:
        """Begin a life of a role that was not there, or was ended on purpose."""
        member.begin()
        member.died_at = None
        if member not in self.crew:
            self.crew.append(member)
            order = list(self._nodes)
            self.crew.sort(key=lambda one: order.index(one.name))
        self._lives[member.name] = self._begin(member.name)
        self._watchdog.heard(member.name, time.monotonic())

    def _leave(self, member: Member) -> None:
        self._ports[member.name].folder = self._folder.path  # where those are who sent to it, or heard of it
        super()._leave(member)
        if member.report.kind not in self._together:  # only groups are whole again when the run is resumed
            self._left = [node for node in self._left if node.name != member.name]
        self._deadlines.pop(member.name, None)
        member.died_at = None
        self._away[member.name] = member
        if any(other.done for other in self.crew if other.report.kind == member.report.kind):
            self._close_for(member.name)

    def _note(self, member: Member, answer: Answer) -> None:
        super()._note(member, answer)
        if answer.what == "done":  # whoever waits for all of its kind must not wait for those who are away
            for name, other in self._away.items():
                if other.report.kind == member.report.kind:
                    self._close_for(name)

    def _close_for(self, name: str) -> None:
        for end in ends(self._nodes[name].handles):
            if end.side == "sender":
                self._ports[name].open(end).close()

    def _listen(self, seconds: float) -> list[tuple[Member, Answer | Report]]:
        now = time.monotonic()
        for name, until in self._deadlines.items():
            if now >= until and name in self._lives:
                self._lives[name].condemn("it was asked to leave and did not")
        return super()._listen(seconds)

    # ------------------------------------------------------------------ groups

    def _of(self, kind: str) -> list[Node]:
        return [node for node in self._nodes.values() if node.kind == kind]

    def _members(self, kind: str) -> list[Member]:
        return [member for member in self.crew if member.report.kind == kind]

    def _inlets(self, node: Node) -> list[Path]:
        """Return the stems of the streams that a role receives from, as those see them who send there."""
        return [edge_stem(self._folder.path, end.edge) for end in ends(node.handles) if end.side == "receiver"]

    def _desert(self, node: Node, deserted: bool = True) -> None:
        for stem in self._inlets(node):
            desert(stem, deserted)

    def _drained(self, kind: str) -> bool:
        """Let the run go on until a group has taken all that was sent to it; returns whether it has.

        It may wait for one of its sources before it takes what another has sent. So when nothing moves any more, those
        of whom nothing is left may send one more message.
        """
        sources, until = self._sources(kind), time.monotonic() + _DRAIN_S
        taken, since = -1, 0.0
        while True:
            levels = {level.edge: level for level in self._levels.read()}
            left = {name for name, edges in sources.items() if any(levels[e].sent > levels[e].taken for e in edges)}
            if not left:
                return not _hindrance(self._members(kind))
            now, before = time.monotonic(), taken
            taken = sum(levels[edge].taken for edges in sources.values() for edge in edges)
            since = now if taken != before else since
            if now >= until or self.done:
                return False
            if now - since >= _STUCK_S:
                since = now
                for edge in (edge for name in sources.keys() - left for edge in sources[name]):
                    hold(edge_stem(self._folder.path, edge), 1)
            self.advance()

    def _sources(self, kind: str) -> dict[str, list[str]]:
        """Return the streams to the members of a group, by who sends there."""
        inlets = {
            end.edge
            for member in self._members(kind)
            for end in ends(self._nodes[member.name].handles)
            if end.side == "receiver"
        }
        found = {
            name: [end.edge for end in ends(node.handles) if end.side == "sender" and end.edge in inlets]
            for name, node in self._nodes.items()
        }
        return {name: edges for name, edges in found.items() if edges}

    def _at_rest(self, kind: str, rest: str) -> bool:
        """Let a paused group step until it has nothing left to do; returns whether it came to that."""
        for _ in range(_ROUNDS):
            answers = self._ask("step", self._members(kind)).values()
            if all(isinstance(answer.status, Idle) for answer in answers):
                return all(isinstance(answer.status, Idle) and answer.status.reason == rest for answer in answers)
        return False

    def _form(self, kind: str, size: int) -> None:
        """Begin the first so many of a kind as a group, all with the same number of lives behind them."""
        nodes = self._of(kind)
        life = max(self._ports[node.name].life for node in nodes) + 1
        everybody = {member.name: member for member in [*self.crew, *self._away.values()]}
        self._groups.form(kind, [node.name for node in nodes[:size]])
        self._lodge([node.name for node in nodes[:size]])
        self._left = [node for node in self._left if node.kind != kind]
        for number, node in enumerate(nodes):
            member, ports = everybody[node.name], self._ports[node.name]
            self._desert(node, number >= size)
            ports.life, ports.gone, ports.planned = life, len(nodes) - size, True
            if number < size:
                member.life += member.name not in self._away
                self._away.pop(member.name, None)
                self._enter(member)
            elif member in self.crew:
                self.crew.remove(member)
                self._away[member.name] = member
                ports.folder = self._folder.path

    # ------------------------------------------------------------------ checkpoints

    def _capture_own_ends(self, directory: Path) -> list[Callable[[], None]]:
        parts = super()._capture_own_ends(directory)
        if self._turns is None:  # in lock-step nobody is ever away
            lives = max(ports.life for ports in self._ports.values()) + 1
            parts.append(Captured(directory, _AWAY, {"lives": self._former_lives + lives}).write)
        left = {node.name for node in self._left}
        for name in self._away.keys() - left:
            own = OpenEnds(self._ports[name].open)
            open_handles(self._nodes[name].handles, own.open)
            own.drain()  # what came for it, after it had gone
            parts.append(own.capture(directory, name).write)
        return parts

    def _restore_own_ends(self, directory: Path) -> None:
        super()._restore_own_ends(directory)
        if (directory / f"{_AWAY}.msgpack").exists():  # older checkpoints have none
            self._former_lives = int(checkpoint.read_state(directory, _AWAY)["lives"])
        for name in self._away:
            if edgestates.known(directory, name):
                own = OpenEnds(self._ports[name].open)
                open_handles(self._nodes[name].handles, own.open)
                own.restore(directory, name)


def _hindrance(members: Sequence[Member]) -> str:
    """Return why these roles cannot be formed anew now; empty if they can."""
    dead = [member.name for member in members if member.died_at is not None]
    if dead:
        return f"{', '.join(dead)} died and must be begun anew first"
    over = [member.name for member in members if member.done]
    return f"{', '.join(over)} has come to its end" if over else ""
