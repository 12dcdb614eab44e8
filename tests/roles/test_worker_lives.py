"""Workers that die at the worst moments: each batch is in one gradient, and in mode sync in the same round for all."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from role_cases import random_batch
from serving_cases import Fleet, learner_setup, part_of, same

from qfleet.core.types import Standing
from qfleet.roles import server_link
from qfleet.runtime.inline import LocalStream

WORKERS = 2
FATES = ("lives", "dies before it begins", "dies before its gradient has a number", "dies before it acknowledges")


class Death(Exception):
    """Takes the place of a kill."""


class Held(LocalStream):
    """A stream whose messages stay until they are acknowledged, as between processes."""

    def __init__(self) -> None:
        super().__init__(1000, same)
        self.taken: deque[Any] = deque()

    def receive(self) -> Any:
        message = super().receive()
        if message is not None:
            self.taken.append(message)
        return message

    def put_back(self) -> None:
        self.queue.extendleft(reversed(self.taken))
        self.taken.clear()


class Mortals:
    """Workers in front of servers, of which each may die in any step."""

    def __init__(self, mode: str, masses: list[float], draws: int) -> None:
        self.feeds = [[Held() for _ in masses] for _ in range(WORKERS)]
        learner = learner_setup(shards=len(masses))
        self.fleet = Fleet(WORKERS, 2, keeps=True, learner=learner, feeds=self.feeds, mode=mode)
        rng = np.random.default_rng(0)
        told = tuple(Standing(mass, 1.0) for mass in masses) if len(masses) > 1 else ()
        for draw, shard in itertools.product(range(1, draws + 1), range(len(masses))):
            batch = dataclasses.replace(random_batch(rng, 4), draw=draw, shard=shard, standings=told)
            for worker, streams in enumerate(self.feeds):
                streams[shard].send(part_of(batch, worker, WORKERS))

    def play(self, turns: list[tuple[int, str]]) -> None:
        """Let roles make steps, workers with a fate each; then let all come to their end."""
        for role, fate in turns:
            if role < WORKERS:
                self._step(role, fate)
            else:
                self.fleet.servers[role - WORKERS].step()
        for stream in itertools.chain(*self.feeds):
            stream.close()
        self.fleet.finish()

    def _step(self, worker: int, fate: str) -> None:
        def die(name: str) -> None:
            raise Death

        dead = fate in FATES[1::2]
        with pytest.MonkeyPatch.context() as patch:
            if fate == FATES[2]:
                patch.setattr(server_link, "failpoint", die)
            try:
                if fate != FATES[1]:
                    self.fleet.workers[worker].step()
            except Death:
                dead = True
        for stream in self.feeds[worker]:
            if dead:
                stream.put_back()
            stream.taken.clear()
        if dead:
            self.fleet.restart_worker(worker)


TURNS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(FATES)), max_size=60)


@settings(max_examples=40, deadline=None)
@given(turns=TURNS, masses=st.lists(st.sampled_from([1.0, 2.0, 7.0]), min_size=1, max_size=3))
def test_workers_in_step_stay_so_whenever_they_die(turns: list[tuple[int, str]], masses: list[float]) -> None:
    mortal, immortal = (Mortals("sync", masses, draws=5) for _ in range(2))
    mortal.play(turns)
    immortal.play([])
    assert mortal.fleet.versions == [5 * len(masses)] * 2
    assert np.array_equal(mortal.fleet.parameters, immortal.fleet.parameters)


@settings(max_examples=30, deadline=None)
@given(turns=TURNS, mode=st.sampled_from(["async", "stale"]))
def test_in_the_other_modes_every_batch_is_in_one_gradient_too(turns: list[tuple[int, str]], mode: str) -> None:
    mortal = Mortals(mode, [1.0], draws=5)
    mortal.play(turns)
    assert mortal.fleet.versions == [5 * WORKERS] * 2
