"""The placement for one machine: every role a child of this process, which supervises, and edges in shared memory."""

from __future__ import annotations

import atexit
import dataclasses
import os
import pickle
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Unpack

from qfleet.core.errors import ConfigError
from qfleet.core.protocols import Machine
from qfleet.runtime.channels import Ports, StreamLevels, lay_out
from qfleet.runtime.child import RoleSetup
from qfleet.runtime.children import Child, Unbegun, Unborn, main_module_hidden, preload, wait_for
from qfleet.runtime.comings import ComingsPlacement
from qfleet.runtime.graph import Graph, Node
from qfleet.runtime.memory import RunFolder
from qfleet.runtime.reviving import Revival
from qfleet.runtime.worker import OpenEnds

_HERE = "here"
"""The id of the only machine."""


class ProcessPlacement(ComingsPlacement):
    """Runs each node of a graph in its own process.

    `spawn` names the kinds of roles that must not be forked; `threads` gives the threads of torch and OpenMP by kind,
    one where not given. Kinds in `background` leave a core to any other that wants it. Roles in `away` are not begun
    yet. `pack` makes bytes of a node that `pickle` reads; by default what children could not import is refused.
    """

    name = "processes"

    def __init__(
        self,
        graph: Graph,
        spawn: Collection[str] = (),
        threads: Mapping[str, int] | None = None,
        background: Collection[str] = (),
        away: Collection[str] = (),
        shared: Mapping[str, int] | None = None,
        pack: Callable[[Node], bytes] | None = None,
        **revival: Unpack[Revival],
    ) -> None:
        super().__init__(graph, away, shared, **revival)
        self._payloads = {node.name: (pack or packed)(node) for node in graph.nodes}
        self._folder = RunFolder()
        self._setups: dict[str, RoleSetup] = {}
        atexit.register(self.close)  # before multiprocessing's own handler, which would wait for the children
        try:
            lay_out(graph, self._folder.path)
            self._levels = StreamLevels(graph, self._folder.path)
            self._ends = OpenEnds(Ports(self._folder.path, hold=False).open)
            preload({node.build.__module__ for node in graph.nodes})
            for node in graph.nodes:
                method = "spawn" if node.kind in spawn else "forkserver"
                count = (threads or {}).get(node.kind, 1)
                behind = node.kind in background
                last_words = self._folder.path / f"{node.name}.last_words"
                ports = self._ports[node.name] = Ports(self._folder.path)
                self._setups[node.name] = RoleSetup(node.name, (), ports, method, count, behind, last_words)
            self._mark_away()
            for member in self.crew:
                self._lives[member.name] = self._begin(member.name)
            self._await("built")
        except BaseException:
            self.close()
            raise

    def _begin(self, name: str) -> Child | Unborn:
        payloads = tuple(self._payloads[node.name] for node in self._housed(name))
        try:
            return Child(dataclasses.replace(self._setups[name], payloads=payloads).birth())
        except Unbegun as error:
            return Unborn(str(error))

    def machines(self) -> list[Machine]:
        """Return this machine."""
        return [Machine(_HERE, socket.gethostname(), float(len(os.sched_getaffinity(0))))]

    def home(self, name: str) -> str:
        """Return this machine's id."""
        return _HERE

    def _settle(self, name: str, machine: str) -> None:
        """Do nothing: all edges are here."""

    def _lodge(self, names: Sequence[str]) -> None:
        """Do nothing: there is one place."""

    def _wait_for_news(self, seconds: float) -> None:
        wait_for((child for child in self._lives.values() if isinstance(child, Child)), seconds)

    def _end(self) -> None:
        atexit.unregister(self.close)
        try:
            self._end_lives()
        finally:
            self._folder.remove()


def packed(node: Node) -> bytes:
    """Return a node as bytes; refuses what a child could not import."""
    with main_module_hidden():
        try:
            return pickle.dumps(node)
        except Exception as error:
            raise ConfigError(
                f"{node.name} cannot be sent to another process ({error}): "
                "run with --placement inline or move the class to a module"
            ) from error
