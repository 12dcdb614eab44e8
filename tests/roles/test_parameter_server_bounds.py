"""No gradient is older, no worker further ahead than allowed, whatever the order of events; and none waits for ever."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from role_cases import random_batch
from serving_cases import Fleet, same

from qfleet.parallel.serving import ServerConfig
from qfleet.parallel.staleness import Arrivals
from qfleet.replay.allocation import zeros
from qfleet.runtime.inline import LocalStream


class Model:
    """Workers and the books of several servers, which exchange numbers only.

    Each worker computes one gradient at a time at what it pulled, sends it to the servers one after the other, and
    pulls again when all have taken it. It may be cut off between two of them.
    """

    def __init__(self, config: ServerConfig, workers: int, servers: int, gradients: int) -> None:
        self.config, self.left = config, [gradients] * workers
        self.books = [Arrivals(config, workers, zeros) for _ in range(servers)]
        self.base = [[0] * servers for _ in range(workers)]
        self.unsent: list[list[int]] = [list(range(servers)) for _ in range(workers)]
        self.waiting: list[dict[int, int]] = [{} for _ in range(servers)]
        """By server: the versions at which the gradients in its streams were computed, by worker."""
        self.staleness: list[int] = []
        self.ahead: list[int] = []

    def send(self, worker: int) -> bool:
        if not self.left[worker] or not self.unsent[worker]:
            return False
        server = self.unsent[worker].pop()
        self.waiting[server][worker] = self.base[worker][server]
        return True

    def take(self, server: int, worker: int) -> bool:
        books = self.books[server]
        live = [w for w, left in enumerate(self.left) if left]
        if worker not in self.waiting[server] or not books.admits(worker, live):
            return False
        self.staleness.append(books.version - self.waiting[server].pop(worker))
        books.arrive(worker, int(books.taken[worker]) + 1)
        self.ahead.append(int(books.taken[worker] - min(books.taken[w] for w in live)))
        return True

    def pull(self, worker: int) -> bool:
        if not self.left[worker] or self.unsent[worker] or any(worker in here for here in self.waiting):
            return False
        self.left[worker] -= 1
        self.base[worker] = [books.version for books in self.books]
        self.unsent[worker] = list(range(len(self.books)))
        return True

    def anything(self) -> bool:
        """Let one thing happen that can; return whether there was one."""
        workers, servers = range(len(self.left)), range(len(self.books))
        return (
            any(self.take(server, worker) for server in servers for worker in workers)
            or any(self.pull(worker) for worker in workers)
            or any(self.send(worker) for worker in workers)
        )


@st.composite
def histories(draw: st.DrawFn) -> tuple[Model, int]:
    workers, servers = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    mode = draw(st.sampled_from(["async", "stale"]))
    bound = draw(st.integers(max(workers - 1, 1), workers + 4)) if mode == "async" else draw(st.integers(1, 3))
    config = ServerConfig(mode=mode, max_staleness=bound, slack=bound)
    model = Model(config, workers, servers, gradients=draw(st.integers(1, 8)))
    which = st.tuples(st.sampled_from("stp"), st.integers(0, servers - 1), st.integers(0, workers - 1))
    for what, server, worker in draw(st.lists(which, max_size=150)):
        if what == "s":
            model.send(worker)
        elif what == "t":
            model.take(server, worker)
        else:
            model.pull(worker)
    return model, bound


@settings(max_examples=400, deadline=None)
@given(history=histories())
def test_bounds_hold_in_every_order_and_all_gradients_are_taken_in_the_end(history: tuple[Model, int]) -> None:
    model, bound = history
    while model.anything():
        pass
    assert model.left == [0] * len(model.left), "somebody waits for ever"
    assert len({books.version for books in model.books}) == 1
    if model.config.mode == "async":
        assert max(model.staleness) <= bound
    else:
        assert max(model.ahead) <= bound


class SlowStream(LocalStream):
    """What is sent here arrives some ticks later: as long as its worker is to take for a gradient."""

    now: float = 0

    def __init__(self, worker: int) -> None:
        super().__init__(2, same)
        self._ticks, self._arrives = (1, 1, 1, 5)[worker], 0.0

    def send(self, message: Any) -> None:
        super().send(message)
        self._arrives = SlowStream.now + self._ticks

    def receive(self) -> Any:
        return super().receive() if self._arrives <= SlowStream.now else None


def run_a_while(ticks: int, **serving: Any) -> Fleet:
    """Let four workers compute side by side, of which the last takes five times as long for each gradient."""
    fleet = Fleet(workers=4, stream=SlowStream, **serving)
    rng = np.random.default_rng(0)
    for stream in fleet.batches:
        for _ in range(ticks + 20):
            stream.send(random_batch(rng, size=4))
    for SlowStream.now in range(ticks):
        for role in (*fleet.servers, *fleet.workers):
            role.step()
    return fleet


def gradients_of(fleet: Fleet) -> int:
    return int(fleet.servers[0].metrics()["gradients"])


def test_one_slow_worker_of_four_does_not_hold_up_the_others() -> None:
    """At least 3.5 times the gradients of mode sync, in the time of the workers' computations."""
    taken = {mode: gradients_of(run_a_while(100, mode=mode)) for mode in ("sync", "async", "stale")}
    assert taken["async"] >= 3.5 * taken["sync"]
    assert taken["sync"] < taken["stale"] < taken["async"]


@pytest.mark.parametrize(("bound", "most"), [(3, 3), (6, 6), (64, 15)])
def test_the_slow_workers_gradient_is_never_older_than_allowed(bound: int, most: int) -> None:
    fleet = run_a_while(40, mode="async", max_staleness=bound)
    assert fleet.servers[0].metrics()["staleness_most"] == most
    SlowStream.now = math.inf  # all are fast
    fleet.finish()
    assert fleet.servers[0].metrics()["staleness_most"] <= bound
    assert fleet.versions == [240], "none was dropped"


@settings(max_examples=15, deadline=None)
@given(
    mode=st.sampled_from(["sync", "async", "stale"]),
    order=st.lists(st.integers(0, 4), max_size=60),
    servers=st.integers(1, 2),
)
def test_real_workers_and_servers_end_in_every_order(mode: str, order: list[int], servers: int) -> None:
    torch.set_num_threads(1)
    fleet = Fleet(workers=3, servers=servers, mode=mode, max_staleness=2, slack=1)
    rng = np.random.default_rng(0)
    for stream in fleet.batches:
        for _ in range(5):
            stream.send(random_batch(rng, size=4))
    for number in order:
        fleet.roles[number % len(fleet.roles)].step()
    fleet.finish()
    assert fleet.versions == [5 if mode == "sync" else 15] * servers
    assert all(server.metrics()["staleness_most"] <= 2 for server in fleet.servers)
    (model,) = fleet.edges["models"].queue
    assert np.array_equal(model.flat[: len(fleet.parameters)], fleet.parameters)
    assert fleet.edges["updates"].count == fleet.versions[0]


def test_with_one_worker_all_modes_are_the_same() -> None:
    found = []
    for mode in ("sync", "async", "stale"):
        fleet = Fleet(workers=1, servers=2, mode=mode)
        rng = np.random.default_rng(0)
        for _ in range(10):
            fleet.batches[0].send(random_batch(rng))
        fleet.run()
        found.append(fleet.parameters)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
