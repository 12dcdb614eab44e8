"""When a server computes: what waits is answered once, in order, and never waits much longer than it may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_cases import Clock, request, server, wires
from role_cases import Edge

from qfleet.core.role import DONE, WORKED, Idle
from qfleet.roles import inference_server
from qfleet.roles.batching import Batcher

CLIENTS, DEADLINE, BATCH_S, TICK_S = 3, 2.0, 0.5, 0.05


def test_rows_are_laid_side_by_side_and_a_new_batch_begins_at_the_first():
    batcher = Batcher(batch=8, deadline_s=1.0)
    assert [batcher.add(2, 0, 3, 0.0), batcher.add(0, 7, 2, 0.1)] == [slice(0, 3), slice(3, 5)]
    assert [(w.client, w.sequence, w.part) for w in batcher.take()] == [(2, 0, slice(0, 3)), (0, 7, slice(3, 5))]
    assert len(batcher) == 0
    assert batcher.add(1, 0, 4, 0.2) == slice(0, 4)


@pytest.mark.parametrize(
    ("rows", "now", "present", "left"),
    [
        (3, 10.25, (0, 1), 0.75),  # somebody else may come
        (3, 11.5, (0, 1), 0.0),  # too late for more
        (8, 10.0, (0, 1), 0.0),  # enough
        (3, 10.0, (0,), 0.0),  # nobody else can come
    ],
)
def test_a_batch_waits_only_where_more_can_come(rows, now, present, left):
    batcher = Batcher(batch=8, deadline_s=1.0)
    batcher.add(0, 0, rows, 10.0)
    assert batcher.seconds_left(now, present) == left


class Client:
    """Asks, waits for its answer, pauses, and asks again; sends everything twice if it is `impatient`."""

    def __init__(self, life: list[tuple[float, int]], impatient: bool, requests: Edge, replies: Edge) -> None:
        self.life, self.impatient, self.requests, self.replies = list(life), impatient, requests, replies
        self.asked: list[float] = []
        self.answered: list[int] = []
        self.next_at = life[0][0] if life else 0.0

    def step(self, now: float, rng: np.random.Generator) -> None:
        while (reply := self.replies.receive()) is not None:
            self.answered.append(reply.sequence)
            assert now - self.asked[reply.sequence] <= DEADLINE + 2 * BATCH_S + 2 * TICK_S
            self.next_at = now + (self.life[0][0] if self.life else 0.0)
        if len(self.answered) < len(self.asked) or now < self.next_at:
            return
        if not self.life:
            self.requests.close()
            return
        message = request(len(self.asked), rng, rows=self.life.pop(0)[1])
        self.asked.append(now)
        for _ in range(1 + self.impatient):
            self.requests.send(message)


lives = st.lists(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 4)), max_size=6), min_size=CLIENTS, max_size=CLIENTS
)
"""Of each client: its pauses before each request, and the request's rows."""


@given(lives=lives, batch=st.integers(1, 12), impatient=st.lists(st.booleans(), min_size=CLIENTS, max_size=CLIENTS))
@settings(max_examples=50, deadline=None)
def test_every_request_is_answered_once_in_order_and_in_time(lives, batch, impatient):
    clock, edges, rng = Clock(), wires(CLIENTS, capacity=16), np.random.default_rng(0)
    clients = [Client(*client) for client in zip(lives, impatient, edges.requests, edges.replies, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference_server, "time", clock)
        role = server(edges, rows=4 * CLIENTS, batch=batch, deadline_ms=1000 * DEADLINE)
        while (status := role.step()) != DONE:
            clock.now += BATCH_S if status == WORKED else TICK_S
            for client in clients:
                client.step(clock.now, rng)
    assert [client.answered for client in clients] == [list(range(len(life))) for life in lives]


def test_a_server_without_requests_idles_and_ends_with_its_actors():
    edges = wires(2)
    role = server(edges, rows=8)
    status = role.step()
    assert isinstance(status, Idle)
    assert status.deadline is None
    edges.requests[0].close()
    assert isinstance(role.step(), Idle)
    edges.requests[1].close()
    assert role.step() == DONE
