"""Which roles live and die together, and who of them leaves when one dies."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from qfleet.runtime.graph import Graph


class Groups:
    """The groups of a run's roles, by their names; a role that is in none is a group of its own."""

    def __init__(self, graph: Graph, together: Collection[str], dwindling: Collection[str]) -> None:
        """Take the kinds whose roles are a group, and those of them that go on with one less after each death."""
        self._groups = {
            node.name: [other.name for other in graph.nodes if other is node or node.kind == other.kind in together]
            for node in graph.nodes
        }
        self._kinds = {node.name: node.kind for node in graph.nodes}
        self._dwindling = {node.name for node in graph.nodes if node.kind in dwindling}
        self.drawn = {name: len(group) for name, group in self._groups.items()}
        """How many were in each role's group at first."""

    def of(self, name: str) -> list[str]:
        """Return those who live and die with a role, itself among them."""
        return self._groups[name]

    def leaver(self, name: str) -> str | None:
        """Return who leaves for good when a role dies; None if nobody does, or would be left.

        That is the last one, whoever died: those who are left are the first so many, and the first one can stay who
        speaks for all.
        """
        group = self._groups[name]
        return group[-1] if name in self._dwindling and len(group) > 1 else None

    def form(self, kind: str, members: Sequence[str]) -> None:
        """Let these be all of a kind that live and die together, in this order; the others are alone."""
        for name in (name for name, other in self._kinds.items() if other == kind):
            self._groups[name] = [name]
        self._groups |= {name: list(members) for name in members}

    def leave(self, name: str) -> list[str]:
        """Take a role out of its group; returns those who are left."""
        left = [other for other in self._groups[name] if other != name]
        self._groups |= dict.fromkeys(left, left)
        self._groups[name] = [name]
        return left
