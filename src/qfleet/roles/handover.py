"""What those who learned hand on to those who go on in another arrangement: more ranks, fewer, or parameter servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qfleet.algo.flat import FlatParameters
from qfleet.algo.optim import each_vector, is_vector
from qfleet.core import seeding
from qfleet.core.role import State
from qfleet.core.types import Floats, Ints, Priorities
from qfleet.parallel.slices import cut
from qfleet.roles.serving_setup import ServingSetup, first_network


@dataclass(frozen=True)
class Heritage:
    """What was learned, whoever learned it. What single ranks were in the middle of is no part of it."""

    update: State
    """That of one learner with a whole network: weights, optimiser, target network, random numbers."""
    shown: State
    """What was published and evaluated."""
    batches: int
    updates: int
    skipped: int
    lag_sum: int
    epoch: int
    """The last epoch of the weights; heirs begin another, since they may number weights in another way."""
    feed: State
    unsent: tuple[Priorities, ...]
    """What the shards have not been told."""
    settings: Mapping[str, Any]
    """How updates were computed."""
    owed: Mapping[int, State]
    """What compression still owes, by rank."""

    def with_unsent(self, further: Sequence[Priorities]) -> Heritage:
        """Return the same with more to tell the shards, which was on its way before."""
        return replace(self, unsent=(*further, *self.unsent))


def of_learners(states: Sequence[State]) -> Heritage:
    """Return what the ranks of a group, in their order, hand on: of ranks that learned apart, the first one's."""
    first = states[0]
    batches, updates, _, skipped, evaluations = first["counters"]
    return Heritage(
        update=first["update"],
        shown={
            "evaluations_due": evaluations,
            "published": first["published"],
            "reward_scale": first["reward_scale"],
            "packer": first.get("packer", {}),
        },
        batches=batches,
        updates=updates,
        skipped=skipped,
        lag_sum=first["lag_sum"],
        epoch=first.get("epoch", 0),
        feed=first.get("feed", {}),
        unsent=tuple(message for state in states for message in state.get("unsent", ())),
        settings=first.get("settings", {}),
        owed={rank: state.get("joining", {}) for rank, state in enumerate(states)},
    )


def of_servers(workers: Sequence[State], servers: Sequence[State]) -> Heritage:
    """Return what workers and servers, each in their order, hand on; gradients on their way are no part of it."""
    first, slices = workers[0], [server["slice"] for server in servers]
    batches, _, skipped, lag_sum, epoch = first["counters"]
    values = np.concatenate([part["parameters"] for part in slices])
    weights: Floats = np.concatenate([values, first["update"]["step"]["weights"][len(values) :]])  # then buffers
    updates = min(int(part["version"]) for part in slices)
    optim = {**slices[0]["optim"], "moments": _joined([part["optim"]["moments"] for part in slices])}
    return Heritage(
        update={**first["update"], "step": {"weights": weights, "optim": optim, "count": updates}},
        shown=first["publishing"],
        batches=batches,
        updates=updates,
        skipped=skipped,
        lag_sum=lag_sum,
        epoch=epoch,
        feed=first["feed"],
        unsent=tuple(message for worker in workers for message in worker["unsent"]),
        settings={},
        owed={},
    )


def for_learner(heritage: Heritage, rank: int) -> State:
    """Return the state that one rank of a group begins with; the first speaks for all."""
    shown = heritage.shown if rank == 0 else {"evaluations_due": 0, "published": None, "packer": {}}
    return {
        "update": heritage.update,
        "counters": [heritage.batches, heritage.updates, 0, heritage.skipped, shown["evaluations_due"]],
        "published": shown["published"],
        "packer": shown["packer"],
        "lag_sum": heritage.lag_sum,
        "reward_scale": heritage.shown["reward_scale"],
        "settings": dict(heritage.settings),
        "epoch": heritage.epoch + 1,
        **({"feed": heritage.feed} if heritage.feed else {}),
        "unsent": list(heritage.unsent) if rank == 0 else [],
        "joining": heritage.owed.get(rank, {}),
    }


def for_worker(heritage: Heritage, setup: ServingSetup) -> State:
    """Return the state that a gradient worker begins with; the first speaks for all."""
    step, first = heritage.update["step"], setup.index == 0
    return {
        "update": {
            **heritage.update,
            "step": {"weights": step["weights"], "count": heritage.updates, "learning_rate": 0.0},
            **({} if first or setup.serving.mode == "sync" else {"generator": _own_noise(setup)}),
        },
        "counters": [heritage.batches, 0, heritage.skipped, heritage.lag_sum, heritage.epoch + 1],
        "publishing": heritage.shown if first else None,
        "settings": {},
        "feed": heritage.feed,
        "unsent": list(heritage.unsent) if first else [],
        "sequence": int(_taken(heritage.updates, setup)[setup.index]),
    }


def for_server(heritage: Heritage, setup: ServingSetup) -> State:
    """Return the state that a parameter server begins with: its slice, and books as if its workers had made it."""
    flat, step = FlatParameters(first_network(setup.learner)[0]), heritage.update["step"]
    part, updates = cut(len(flat.parameters), setup.serving.servers)[setup.index], heritage.updates
    moments = each_vector(step["optim"]["moments"], lambda whole: whole[part].clone())
    taken, rounds = _taken(updates, setup), setup.serving.mode == "sync"
    if rounds:
        books: State = {"version": np.array([updates]), "arrived": taken}
    else:
        books = {"taken": taken, "since": np.full(setup.workers, updates)}
    return {
        "slice": {
            "version": updates,
            "parameters": np.ascontiguousarray(step["weights"][part]),
            "optim": {**step["optim"], "moments": moments},
        },
        "books": books,
        "held": torch.zeros(setup.workers if rounds else 0, part.stop - part.start),
        "told": -1,  # so that it tells its workers at once
        "counts": [0] * 6,
    }


def _taken(updates: int, setup: ServingSetup) -> Ints:
    """Return how many gradients of each worker [W] so many updates would be made of: of all in each round of mode sync,
    else of one each, in turn."""
    if setup.serving.mode == "sync":
        return np.full(setup.workers, updates)
    return np.array([(updates + setup.workers - 1 - worker) // setup.workers for worker in range(setup.workers)])


def _own_noise(setup: ServingSetup) -> Tensor:
    """Return the random numbers of a worker that draws its own, from their beginning."""
    role, device = f"worker-{setup.index}", torch.device(setup.learner.device)
    return seeding.torch_stream(setup.learner.seed, role, purpose="update", device=device).get_state()


def _joined(moments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an optimiser's state of the whole vector, from those of its slices in their order."""
    return {
        name: torch.cat([one[name] for one in moments]) if is_vector(value) else value
        for name, value in moments[0].items()
    }
