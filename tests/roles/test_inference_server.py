"""The inference server: the network's own values with the newest weights, for whoever asked, whatever dies between."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_cases import NETWORK, PLAIN_AGENT, RECURRENT, request, server, weights_of, wires
from role_cases import SPEC

from qfleet.algo.networks import build_network
from qfleet.core import codec
from qfleet.core.role import WORKED, Idle
from qfleet.core.spec import PLAIN
from qfleet.core.types import InferenceReply, InferenceRequest, Orders, Version
from qfleet.roles import inference_server
from qfleet.roles.served import ServedActing

GREEDY = np.zeros(3, np.float32)
EVERYONE = np.arange(3)


def values(seed: int, observation: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        network = build_network(NETWORK, PLAIN_AGENT, SPEC, seed=seed)
        return network.q({PLAIN: torch.from_numpy(observation)}).numpy()


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_each_client_gets_the_values_of_its_own_rows(sizes):
    edges, rng = wires(len(sizes)), np.random.default_rng(1)
    role = server(edges, rows=16)
    asked = [request(number, rng, size) for number, size in enumerate(sizes)]
    for edge, message in zip(edges.requests, asked, strict=True):
        edge.send(message)
    assert role.step() == WORKED
    for number, (edge, message) in enumerate(zip(edges.replies, asked, strict=True)):
        (reply,) = edge.queue
        assert reply.sequence == number
        np.testing.assert_allclose(reply.q, values(0, message.observation[PLAIN]), rtol=0, atol=1e-6)


def test_a_batch_of_one_request_has_the_bits_of_the_network():
    edges, rng = wires(1), np.random.default_rng(1)
    role = server(edges, rows=16)
    for sequence, rows in enumerate((1, 8, 16)):
        message = request(sequence, rng, rows)
        edges.requests[0].send(message)
        role.step()
        np.testing.assert_array_equal(edges.replies[0].receive().q, values(0, message.observation[PLAIN]))


def test_values_are_those_of_the_newest_weights_and_say_so():
    edges, rng = wires(1), np.random.default_rng(2)
    role = server(edges, rows=3)
    for number in (5, 9):
        edges.weights.publish(weights_of(number, number))
        message = request(number, rng)
        edges.requests[0].send(message)
        role.step()
        reply = edges.replies[0].receive()
        assert reply.version == Version(0, number)
        np.testing.assert_array_equal(reply.q, values(number, message.observation[PLAIN]))


def test_a_client_that_takes_no_replies_stops_only_itself():
    edges, rng = wires(2, capacity=1), np.random.default_rng(3)
    role = server(edges, rows=6, deadline_ms=0.0)
    for sequence in range(3):
        for edge in edges.requests:
            if edge.ready():
                edge.send(request(sequence, rng))
        assert role.step() == WORKED
        assert edges.replies[1].receive().sequence == sequence
    assert [reply.sequence for reply in edges.replies[0].queue] == [0]
    idle = role.step()
    assert isinstance(idle, Idle)
    assert edges.replies[0] in idle.wake_on, "its request waits for that room, and rings no more"
    assert edges.replies[1] not in idle.wake_on
    edges.replies[0].receive()
    assert role.step() == WORKED
    assert [reply.sequence for reply in edges.replies[0].queue] == [1]


def test_what_waits_is_saved_and_answered_after_a_restore():
    edges, rng = wires(2), np.random.default_rng(4)
    role = server(edges, rows=6, deadline_ms=10_000, agent=RECURRENT)
    edges.weights.publish(weights_of(3, 7, agent=RECURRENT))
    memory = rng.normal(size=(3, 9)).astype(np.float32)
    memory[:, -1] = (0, 1, 2)
    message = InferenceRequest(4, request(0, rng).observation, memory)
    edges.requests[0].send(message)
    assert isinstance(role.step(), Idle)
    restored = server(edges, rows=6, deadline_ms=0.0, agent=RECURRENT)
    restored.load_state_dict(codec.roundtrip(role.state_dict()))
    assert restored.step() == WORKED
    reply: InferenceReply = edges.replies[0].receive()
    network = build_network(NETWORK, RECURRENT, SPEC, seed=3)
    with torch.inference_mode():
        observation = {PLAIN: torch.from_numpy(message.observation[PLAIN])}
        q, after = network.recall(observation, torch.from_numpy(memory))
    np.testing.assert_array_equal(reply.q, q.numpy())
    np.testing.assert_array_equal(reply.state, after.numpy())


class Client:
    """One part of an actor's environments at a server, with a clock set by hand."""

    def __init__(self, edges, life: int = 0, lines: int = 1) -> None:
        self.now = 0.0
        streams = tuple(edges.requests[:lines]), tuple(edges.replies[:lines])
        self.acting = ServedActing(PLAIN_AGENT, 3, *streams, life, resend_s=5.0, clock=lambda: self.now)
        self.rng = np.random.default_rng(0)

    def ask(self, seed: int) -> np.ndarray:
        observation = np.random.default_rng(seed).normal(size=(3, 3)).astype(np.float32)
        self.acting.ask({PLAIN: observation}, None, EVERYONE)
        return observation


def test_a_request_that_died_with_its_server_is_asked_again_and_answered():
    edges = wires(2)
    role, client = server(edges, rows=6, deadline_ms=10_000), Client(edges)
    observation = client.ask(1)
    assert isinstance(role.step(), Idle)  # taken, and then the server dies
    role = server(edges, rows=6, deadline_ms=0.0)
    client.now = 4.9
    assert client.acting.answered() is None
    assert isinstance(role.step(), Idle)
    client.now = 5.1
    assert client.acting.answered() is None
    assert role.step() == WORKED
    assert client.acting.answered() is EVERYONE
    np.testing.assert_array_equal(client.acting.act(GREEDY, client.rng).q, values(0, observation))


def test_a_request_asked_twice_is_answered_once_by_one_server_and_used_once_of_two():
    edges = wires(1)
    role, client = server(edges, rows=3), Client(edges)
    client.ask(1)
    client.now = 6.0
    assert client.acting.answered() is None  # asks again
    assert role.step() == WORKED
    assert isinstance(role.step(), Idle)
    assert len(edges.replies[0].queue) == 1
    edges.requests[0].send(InferenceRequest(0, request(0, client.rng).observation))
    assert server(edges, rows=3).step() == WORKED  # a new server knows nothing of the first answer
    assert client.acting.answered() is EVERYONE
    client.acting.act(GREEDY, client.rng)
    observation = client.ask(2)
    assert client.acting.answered() is None
    role.step()
    client.acting.answered()
    np.testing.assert_array_equal(client.acting.act(GREEDY, client.rng).q, values(0, observation))


def test_answers_to_a_former_life_are_not_taken_for_ones_own():
    edges = wires(1)
    role = server(edges, rows=3)
    Client(edges).ask(1)
    role.step()
    client = Client(edges, life=1)
    observation = client.ask(2)
    assert client.acting.answered() is None
    role.step()
    assert client.acting.answered() is EVERYONE
    np.testing.assert_array_equal(client.acting.act(GREEDY, client.rng).q, values(0, observation))


def test_parts_are_acted_for_in_the_order_in_which_they_were_asked():
    edges = wires(2)
    client = Client(edges, lines=2)
    first, second = np.array([0]), np.array([1, 2])
    client.acting.ask({PLAIN: np.ones((1, 3), np.float32)}, None, first)
    client.acting.ask({PLAIN: np.ones((2, 3), np.float32)}, None, second)
    assert not client.acting.room
    late = edges.requests[0].receive()
    role = server(edges, rows=3, deadline_ms=0.0)
    assert role.step() == WORKED
    assert client.acting.answered() is None  # the second part's values are there, the first's are not
    edges.requests[0].send(late)
    role.step()
    assert client.acting.answered() is first
    client.acting.act(GREEDY[:1], client.rng)
    assert client.acting.answered() is second


def test_what_was_asked_for_a_broken_episode_counts_no_more():
    edges = wires(1)
    role, client = server(edges, rows=3), Client(edges)
    client.ask(1)
    client.acting.forget(np.array([2]))
    assert client.acting.asked.size == 0
    role.step()
    observation = client.ask(2)
    assert client.acting.answered() is None
    role.step()
    client.acting.answered()
    np.testing.assert_array_equal(client.acting.act(GREEDY, client.rng).q, values(0, observation))


def test_a_request_without_room_is_sent_when_there_is_some():
    edges = wires(1, capacity=1)
    edges.requests[0].send("left by a former life")
    client = Client(edges)
    client.ask(1)
    assert edges.requests[0] in client.acting.wake_on
    edges.requests[0].receive()
    assert client.acting.answered() is None
    assert [message.sequence for message in edges.requests[0].queue] == [0]
    assert client.acting.wake_on == (edges.replies[0],)


def test_orders_set_the_deadline_and_nobody_waits_for_environments_that_rest():
    edges, rng = wires(4), np.random.default_rng(3)  # two actors with two groups of two environments
    role = server(edges, rows=8, deadline_ms=1e4)

    def answers(sequence: int, clients: tuple[int, ...]) -> bool:
        for client in clients:
            edges.requests[client].send(request(sequence, rng, 2))
        return role.step() == WORKED

    assert not answers(0, (0, 1)), "the other actor may still ask"
    edges.orders.publish(Orders((4, 0), (1e4,)))
    assert answers(1, ()), "it rests"
    edges.orders.publish(Orders((2, 0), (1e4,)))
    assert answers(2, (0,)), "one of the groups rests too"
    edges.orders.publish(Orders((4, 4), (1e4,)))
    assert not answers(3, (2,))
    edges.orders.publish(Orders((4, 4), (0.0,)))
    assert answers(4, ()), "the deadline has passed"
    assert [len(edge.queue) for edge in edges.replies] == [2, 1, 1, 0]


def test_it_computes_on_the_gpu_whose_turn_it_is(monkeypatch):
    turns = []
    monkeypatch.setattr(inference_server, "own_device", lambda *asked: (turns.append(asked), "cpu")[1])
    role = server(wires(1), rows=3)
    inference_server.InferenceServer(dataclasses.replace(role._setup, device="cuda", turn=2), role._handles)
    assert turns == [("cpu", None), ("cuda", 2)]
