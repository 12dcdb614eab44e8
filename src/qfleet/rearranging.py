"""Turns a checkpoint that some learners left into one from which others go on: more ranks, fewer, or servers.

Networks, optimiser and counters are the same under every plan (`roles.handover`). What changes is who has what on its
way: draws that no rank has learned from yet are put together and cut anew, so that each is learned from once.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfleet.core.errors import CheckpointError
from qfleet.core.role import State
from qfleet.core.types import Batch, Priorities
from qfleet.experiment import Experiment
from qfleet.program import Program
from qfleet.roles import handover
from qfleet.roles.dealing import Drawn, joined, share_of
from qfleet.roles.gradient_worker import GradientWorker
from qfleet.roles.handover import Heritage
from qfleet.roles.learner import Learner
from qfleet.roles.parameter_server import ParameterServer
from qfleet.roles.replay_shard import ReplayShard, ShardHandles, ShardSetup
from qfleet.runtime import checkpoint, edgestates
from qfleet.runtime.epochs import Epoch
from qfleet.runtime.graph import End, Node, ends

LEARNING = (Learner.kind, GradientWorker.kind, ParameterServer.kind)
_LANE = re.compile(r"(batches|priorities)-(?:(\d+)-)?(\d+)")
"""The streams between a shard, which is named where there are several, and a rank."""
_ROLE = re.compile(r"([a-z]+)-(\d+)\.msgpack")


def rearranged(found: checkpoint.Found, program: Program, experiment: Experiment, epoch: Epoch) -> checkpoint.Found:
    """Prepare a checkpoint of the same moment that the roles of `program` can go on from; return it.

    It is one of the run's when it is published: whoever is killed before that leaves those that there were.
    """
    old, heritage = found.directory, _inherited(found.directory)
    split = int(found.manifest.get("arrangement", {}).get("split", 1))
    edges = _Edges(edgestates.of_all(old), program, experiment.ranks, split, heritage.updates)
    heritage = heritage.with_unsent(edges.priorities)
    partial = checkpoint.begin(epoch, found.manifest["env_steps"])

    def fill() -> None:
        for path in old.iterdir():
            if _stays(path.name):
                shutil.copyfile(path, partial / path.name)
        for node in program.graph.nodes:
            if node.kind in LEARNING:
                checkpoint.write_state(partial, node.name, _state_for(node, heritage))
        for shard, owed in edges.owed.items():
            state = checkpoint.read_state(old, shard)
            state["limiter"]["owed"] += owed
            checkpoint.write_state(partial, shard, state)
        checkpoint.write_state(partial, edgestates.WHOLE, edges.whole)

    standing = {**found.manifest.get("standing", {}), "learners": experiment.ranks}
    meta = {"standing": standing, "arrangement": experiment.arrangement}
    checkpoint.prepare(epoch, partial, fill, meta)
    return checkpoint.Found(partial, checkpoint.verify(partial), found.skipped, found.mended)


def _stays(name: str) -> bool:
    """Return whether a file of a checkpoint is the same whoever learns."""
    if name == checkpoint.MANIFEST or f"{edgestates.OWN}." in name or name.startswith(f"{edgestates.WHOLE}."):
        return False
    return name.partition("-")[0] not in LEARNING


def _inherited(directory: Path) -> Heritage:
    """Return what the roles that learned have left in a checkpoint."""
    workers, servers = (_states(directory, kind) for kind in (GradientWorker.kind, ParameterServer.kind))
    if workers and servers:
        return handover.of_servers(workers, servers)
    if learners := _states(directory, Learner.kind):
        # Inline one role has all ranks.
        return handover.of_learners(learners[0].get("ranks", learners))
    raise CheckpointError(f"{directory} holds no state of a learner: it was made by a differently arranged run")


def _states(directory: Path, kind: str) -> list[State]:
    """Return the states of all roles of a kind, in their order."""
    numbers = [int(m[2]) for path in directory.iterdir() if (m := _ROLE.fullmatch(path.name)) and m[1] == kind]
    return [checkpoint.read_state(directory, f"{kind}-{number}") for number in sorted(numbers)]


def _state_for(node: Node, heritage: Heritage) -> State:
    """Return the state that a role which learns begins with."""
    if node.kind == GradientWorker.kind:
        return handover.for_worker(heritage, node.config)
    if node.kind == ParameterServer.kind:
        return handover.for_server(heritage, node.config)
    if isinstance(node.config, tuple):  # inline one role has all ranks
        return {"ranks": [handover.for_learner(heritage, rank) for rank in range(len(node.config))]}
    return handover.for_learner(heritage, node.index)


@dataclass
class _Edges:
    """The edges of a program as a checkpoint of other learners has them."""

    old: State
    program: Program
    ranks: int
    """How many ranks learn from now on."""
    old_split: int
    """How many of the old ranks shared a network."""
    updates: int
    """How many the run has made."""
    whole: State = field(init=False)
    """What the new checkpoint has of all edges."""
    owed: dict[str, float] = field(init=False, default_factory=dict)
    """By shard, the transitions for which it draws again: no rank will learn from what it drew for them."""
    priorities: list[Priorities] = field(init=False, default_factory=list)
    """What is on its way to shards, for which there is no room in the streams."""

    def __post_init__(self) -> None:
        graph, old = self.program.graph, self.old["edges"]
        renewed = {name for name in graph.latest_values if name.startswith("slice-")}
        nothing: State = {"value": None, "stamp": 0}
        edges: State = {name: self._kept(name, []) for name in graph.streams if not _is_between_learners(name)}
        edges |= {name: [] for name in graph.streams if _is_between_learners(name)}
        edges |= {name: nothing if name in renewed else self._kept(name, nothing) for name in graph.latest_values}
        edges |= {name: _cells(old.get(name, []), size) for name, size in graph.counters.items()}
        first = self._first_counter("updates")
        edges["updates"] = [self.updates * (cell == first) for cell in range(graph.counters["updates"])]
        for node in graph.nodes:
            if node.kind == ReplayShard.kind:
                self._deal(node.config, node.handles, edges)
        self.whole = {"edges": edges, "seen": {key: self._seen(key, edges) for key in self._readers()}}

    def _kept(self, name: str, nothing: Any) -> Any:
        """Return what an edge held; only those of roles that learn may be new."""
        if name in self.old["edges"]:
            return self.old["edges"][name]
        own = {end.edge for node in self.program.graph.nodes if node.kind in LEARNING for end in ends(node.handles)}
        optional = any(end.edge == name and end.optional for end in self._ends())
        if name not in own and not optional:
            raise CheckpointError(f"the checkpoint has no edge '{name}': it was made by a differently arranged run")
        return nothing

    def _ends(self) -> list[End]:
        handles = [*(node.handles for node in self.program.graph.nodes), self.program.monitor]
        return [end for one in handles for end in ends(one)]

    def _first_counter(self, name: str) -> int:
        """Return which cell of a counter belongs to the first role that learns, which counts for all."""
        learning = [node for node in self.program.graph.nodes if node.kind in LEARNING]
        return next(end.reader for node in learning for end in ends(node.handles) if end.edge == name)

    def _readers(self) -> list[str]:
        return [f"{end.edge}/{end.reader}" for end in self._ends() if end.side == "subscriber"]

    def _seen(self, key: str, edges: State) -> int:
        """Return the stamp that a reader has seen; a new one is not shown what others have seen before."""
        stamp: int = edges[key.rpartition("/")[0]]["stamp"]
        return min(int(self.old["seen"].get(key, stamp)), stamp)

    def _deal(self, setup: ShardSetup, handles: ShardHandles, edges: State) -> None:
        """Put what waited between a shard and the old ranks into its streams to and from the new ones."""
        inlets: Any = handles.batches
        outlets: Any = handles.priorities
        waiting, told = self._lanes("batches", setup.index), self._lanes("priorities", setup.index)
        draws = _whole_draws(waiting, self.old_split)
        dealt = _dealt([draw for draw in draws if _suits(draw, setup)], setup, inlets[: self.ranks], edges)
        self._give_back(_to_learn(waiting) - sum(map(_updates, dealt)), setup, handles, edges)
        left = [message for rank in sorted(told) for message in told[rank]]
        for end in outlets[: max(self.ranks // setup.split, 1)]:
            edges[end.edge], left = left[: end.capacity], left[end.capacity :]
        self.priorities += left

    def _give_back(self, updates: int, setup: ShardSetup, handles: ShardHandles, edges: State) -> None:
        """Have a shard draw for so many updates again."""
        if updates:
            samples: Any = handles.samples
            edges["samples"][samples.reader] -= updates
            self.owed[f"{ReplayShard.kind}-{setup.index}"] = updates * setup.train_period

    def _lanes(self, what: str, shard: int) -> dict[int, list[Any]]:
        """Return the messages that waited between a shard and the old ranks, by rank."""
        matches = [(m, messages) for name, messages in self.old["edges"].items() if (m := _LANE.fullmatch(name))]
        return {int(m[3]): messages for m, messages in matches if m[1] == what and int(m[2] or 0) == shard}


def _is_between_learners(name: str) -> bool:
    """Return whether a stream's content depends on who learns."""
    return _LANE.fullmatch(name) is not None or name.startswith("gradients-")


def _cells(old: Sequence[int], size: int) -> list[int]:
    """Return a counter's cells for so many writers; those that learn, who come last, count nothing but updates."""
    cells = [*old, *[0] * size][:size]
    cells[0] += sum(old) - sum(cells)
    return cells


def _to_learn(waiting: Mapping[int, Sequence[Drawn]]) -> int:
    """Return for how many updates draws are still to be learned from, by who goes on: by the first rank of a group, or
    by whichever got a whole draw."""
    drawn = {one.draw: _updates(one) for rank, lane in waiting.items() for one in lane if rank == 0 or one.parts == 1}
    return sum(drawn.values())


def _whole_draws(waiting: Mapping[int, Sequence[Drawn]], split: int) -> list[Drawn]:
    """Return the first draws, in their order, of which every replica has its share still before it, put together.

    What comes after one of which a share is missing is drawn again with that: numbers of draws have no gaps.
    """
    shares: dict[int, dict[int, Drawn]] = {}
    for rank, messages in waiting.items():
        for message in messages:
            shares.setdefault(message.draw, {})[rank // split if message.parts > 1 else 0] = message
    whole = []
    for number in sorted(shares):
        parts = [shares[number][replica] for replica in sorted(shares[number])]
        if len(parts) < parts[0].parts:
            break
        whole.append(joined(parts))
    return whole


def _suits(draw: Drawn, setup: ShardSetup) -> bool:
    """Return whether a draw has what the new learner wants: observations, or the rows of its own copy of them."""
    return (getattr(draw, "fresh", None) is not None) == setup.mirrored


def _dealt(draws: Sequence[Drawn], setup: ShardSetup, inlets: Sequence[End], edges: State) -> list[Drawn]:
    """Put draws into the streams to the ranks, as their shard would, as long as there is room; return those."""
    replicas = len(inlets) // setup.split
    if setup.dealt:
        dealt = list(draws[: sum(end.capacity for end in inlets)])
        for number, draw in enumerate(dealt):
            edges[inlets[number % len(inlets)].edge].append(_cut_for(draw, 1))
        return dealt
    dealt = list(draws[: inlets[0].capacity])
    for rank, end in enumerate(inlets):
        cut = [_cut_for(draw, replicas) for draw in dealt]
        edges[end.edge] = [share_of(one, rank // setup.split, replicas) if replicas > 1 else one for one in cut]
    return dealt


def _cut_for(draw: Drawn, replicas: int) -> Drawn:
    """Return a draw that says into how many shares it is cut."""
    return dataclasses.replace(draw, parts=replicas)


def _updates(draw: Drawn) -> int:
    """Return how many updates are made from a draw."""
    return draw.updates if isinstance(draw, Batch) else 1
