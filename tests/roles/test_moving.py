"""An actor that is moved between its own network and a server's: it sends what it would have sent without that."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_cases import PLAIN_AGENT, RECURRENT, weights_of, wires
from role_cases import Edge
from test_actor_groups import rows_of
from test_lives import Keep, next_life, with_keep
from test_served_actor import SPEC, assert_equal, local, make_actor, make_server

from qfleet.algo.agent import ReplayAgent
from qfleet.core import codec
from qfleet.core.role import DONE, WORKED, Idle
from qfleet.core.types import Experience, Orders, Version

AGENTS = pytest.mark.parametrize("agent", [PLAIN_AGENT, RECURRENT], ids=["plain", "recurrent"])
LOCAL, SERVED = Orders((4,)), Orders((4,), (0.0,))
MOVES = st.lists(st.sampled_from(["actor", "actor", "server", "local", "served", "restored"]), max_size=150)


class Run:
    """One actor with both ways to act and its server, stepped by hand."""

    def __init__(self, agent: ReplayAgent, groups: int = 1, **actor: Any) -> None:
        self.edges, self._agent, self._actor = wires(groups), agent, {"groups": groups, **actor}
        self._build()
        self.sent: list[Experience] = []

    def _build(self) -> None:
        self.actor, self.handles = make_actor("adaptive", self._agent, self.edges, **self._actor)
        self.server = make_server(self.edges, self._agent)

    def order(self, orders: Orders) -> None:
        self.handles.orders.queue.clear()
        self.edges.orders.queue.clear()
        self.handles.orders.publish(orders)
        self.edges.orders.publish(orders)

    def restore(self) -> None:
        """Begin both anew from what they save."""
        states = codec.roundtrip(self.actor.state_dict()), codec.roundtrip(self.server.state_dict())
        counter, orders = self.handles.env_steps, self.handles.orders
        self.actor.close()
        self._build()
        self.handles.env_steps.count = counter.count
        self.handles.orders.queue.extend(orders.queue)
        self.actor.load_state_dict(states[0])
        self.server.load_state_dict(states[1])

    def do(self, move: str) -> None:
        actions: dict[str, Callable[[], Any]] = {
            "actor": self.actor.step,
            "server": self.server.step,
            "local": lambda: self.order(LOCAL),
            "served": lambda: self.order(SERVED),
            "restored": self.restore,
        }
        actions[move]()
        while (message := self.handles.experience.receive()) is not None:
            self.sent.append(message)


@AGENTS
@given(moves=MOVES)
@settings(max_examples=40, deadline=None)
def test_an_actor_moved_to_and_fro_sends_what_it_would_send_by_itself_bit_by_bit(agent, moves):
    run = Run(agent)
    for move in moves:
        run.do(move)
    for move in ["server", "actor"] * 20:  # whatever is away comes back
        run.do(move)
    assert len(run.sent) >= 4
    for found, expected in zip(run.sent, local(agent, len(run.sent)), strict=True):
        assert_equal(found, expected)
    run.actor.close()


@given(moves=MOVES)
@settings(max_examples=30, deadline=None)
def test_with_several_requests_away_every_stream_stays_whole(moves):
    run = Run(PLAIN_AGENT, groups=2)
    for move in [*moves, *["server", "actor"] * 10]:
        run.do(move)
    for stream in range(4):
        rows = rows_of(run.sent, stream)
        assert None not in rows
        for (seen, *_, final), (after, *_) in pairwise(rows):
            assert final or follows(seen, after), "one step of the pole, or a new episode after a final row"
    steps = sum(int(np.count_nonzero(~message.final)) for message in run.sent)
    written = run.actor.state_dict()["written"][0]
    run.actor.close()
    assert steps == run.handles.env_steps.count - 2 * written, "each step is sent once"
    assert [message.sequence for message in run.sent] == list(range(len(run.sent)))
    assert {message.version for message in run.sent} == {Version(0, 1)}


def follows(seen: tuple[float, ...], after: tuple[float, ...]) -> bool:
    """Return whether one row of CartPole leads to another: places move by speeds times 0.02 s."""
    return bool(
        np.isclose(after[0], seen[0] + 0.02 * seen[1], atol=1e-5)
        and np.isclose(after[2], seen[2] + 0.02 * seen[3], atol=1e-5)
    )


def test_it_moves_when_nothing_is_away_and_asks_nothing_more_until_then():
    run = Run(PLAIN_AGENT, groups=2)
    run.order(SERVED)
    assert [run.actor.step(), type(run.actor.step())] == [WORKED, Idle]
    assert [len(edge.queue) for edge in run.edges.requests] == [1, 1]
    second = run.edges.requests[1].receive()  # this answer takes long
    run.server.step()
    run.order(LOCAL)
    for _ in range(3):
        status = run.actor.step()
    assert isinstance(status, Idle)
    assert status.reason == "the inference server has not answered"
    assert run.handles.env_steps.count == 2, "the half that was answered has stepped, and waits for the other"
    assert not run.edges.requests[0].queue
    run.edges.requests[1].send(second)
    run.server.step()
    before = run.actor.metrics()["network_s"]
    for _ in range(5):
        assert run.actor.step() == WORKED
    assert run.actor.metrics()["network_s"] > before
    assert not any(edge.queue for edge in (*run.edges.requests, *run.edges.replies))
    run.actor.close()


def test_a_network_that_is_not_in_use_has_the_newest_weights_when_it_is_again():
    run = Run(PLAIN_AGENT)
    run.do("actor")
    run.order(SERVED)
    newest = weights_of(5, 9, PLAIN_AGENT, SPEC)
    run.handles.weights.send(newest)
    for move in ["actor", "server"] * 5:
        run.do(move)
    assert run.handles.weights.queue, "it is the server's turn to follow them"
    run.order(LOCAL)
    sent = len(run.sent)
    while len(run.sent) == sent:
        run.do("actor")
    assert run.sent[-1].version == newest.version, "also of a message that the server's values began"


def test_a_message_that_no_server_had_a_part_in_names_the_weights_of_the_network():
    run = Run(PLAIN_AGENT, groups=2)
    run.do("actor")
    run.order(Orders((0,), (0.0,)))  # what is under way is sent, and nothing is asked
    run.do("actor")
    assert [message.version for message in run.sent] == [Version(0, 1)] * 2
    run.actor.close()


def test_a_life_that_begins_anew_follows_the_newest_orders_and_leaves_no_answer_behind():
    edges = wires(1)
    actor, handles = make_actor("adaptive", PLAIN_AGENT, edges)
    first = with_keep(actor, handles, Keep())
    role = make_server(edges, PLAIN_AGENT)
    handles.orders.publish(SERVED)
    first.step()
    role.step()
    assert len(edges.replies[0].queue) == 1
    second = next_life(first)
    assert not edges.replies[0].queue
    handles.orders.publish(SERVED)  # a new reader sees the newest again
    assert second.step() == WORKED
    assert len(edges.requests[0].queue) == 1
    while not handles.experience.queue:
        role.step()
        second.step()
    assert handles.experience.receive().cut.tolist() == [0, 1, 2, 3]


def test_a_server_that_nobody_asks_waits_and_ends_with_the_run():
    run = Run(PLAIN_AGENT, env_steps=80)
    run.order(LOCAL)
    while run.actor.step() != DONE:
        status = run.server.step()
        assert isinstance(status, Idle)
        assert status.deadline is None
        assert status.wake_on == tuple(run.edges.requests)
    assert run.server.step() == DONE


def test_a_server_answers_at_once_those_who_still_wait_when_all_are_moved_away():
    edges = wires(2)
    pair = [make_actor("adaptive", PLAIN_AGENT, edges, index=index, actors=2) for index in range(2)]
    role = make_server(edges, PLAIN_AGENT)
    served = Orders((4, 4), (10_000.0,))
    edges.orders.publish(served)
    pair[0][1].orders.publish(served)
    pair[0][0].step()
    waits = role.step()
    assert isinstance(waits, Idle)
    assert waits.deadline is not None
    assert waits.deadline > 1
    edges.orders.publish(Orders((4, 4)))
    assert role.step() == WORKED
    assert isinstance(edges.replies[0], Edge)
    assert len(edges.replies[0].queue) == 1
