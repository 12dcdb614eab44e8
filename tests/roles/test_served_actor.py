"""An actor that is served does what one with its own network does, and never waits while it could step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inference_cases import NETWORK, PLAIN_AGENT, RECURRENT, Wires, server, weights_of, wires
from role_cases import Edge

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.exploration import EpsilonGreedyConfig
from qfleet.algo.flat import checksum
from qfleet.core import codec
from qfleet.core.role import DONE, WORKED, Idle
from qfleet.core.types import Experience, Orders, Version, Weights
from qfleet.core.usercode import UserCode
from qfleet.envs import GymConfig, env_spec
from qfleet.roles.actor import Actor, ActorConfig, ActorHandles, ActorSetup
from qfleet.roles.inference_server import AdaptiveInference, InferenceServer, LocalInference, ServedInference

ENV = GymConfig(id="CartPole-v1")
SPEC = env_spec(ENV)
KINDS = {"local": LocalInference, "served": ServedInference, "adaptive": AdaptiveInference}


def make_actor(
    kind: str,
    agent: ReplayAgent,
    edges: Wires,
    env_steps: int = 10_000,
    index: int = 0,
    actors: int = 1,
    precision: str = "fp32",
    **actor: Any,
) -> tuple[Actor, ActorHandles]:
    setup = ActorSetup(
        actor=ActorConfig(**{"envs": 4, "unroll": 2, **actor}),
        env=ENV,
        spec=SPEC,
        network=NETWORK,
        agent=agent,
        exploration=EpsilonGreedyConfig(start=0.3, end=0.3),
        seed=0,
        index=index,
        actors=actors,
        env_steps=env_steps,
        code=UserCode(),
        inference=KINDS[kind](precision=precision),
        valued=True,
    )
    lines = slice(index * setup.actor.groups, (index + 1) * setup.actor.groups)
    handles = ActorHandles(
        experience=Edge(),
        weights=Edge([weights_of(5, 1, agent, SPEC)]) if kind != "served" else None,
        env_steps=Edge(),
        requests=tuple(edges.requests[lines]) if kind != "local" else (),
        replies=tuple(edges.replies[lines]) if kind != "local" else (),
        orders=Edge(),
    )
    return Actor(setup, handles), handles


def make_server(edges: Wires, agent: ReplayAgent, precision: str = "fp32") -> InferenceServer:
    edges.weights = Edge([weights_of(5, 1, agent, SPEC)])
    rows = 4 * len(edges.requests)
    return server(edges, rows, agent, SPEC, deadline_ms=0.0, precision=precision)


def local(agent: ReplayAgent, count: int) -> list[Experience]:
    actor, handles = make_actor("local", agent, wires(0))
    for _ in range(count):
        assert actor.step() == WORKED
    return list(handles.experience.queue)


def assert_equal(found: Experience, expected: Experience, tolerance: float = 0.0) -> None:
    assert (found.sequence, found.version) == (expected.sequence, expected.version) == (found.sequence, Version(0, 1))
    for name in ("stream", "action", "reward", "terminated", "truncated", "final", "offsets"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("value", "best"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=tolerance)
    for name, leaf in {**expected.observation, **expected.extras}.items():
        np.testing.assert_array_equal({**found.observation, **found.extras}[name], leaf)


@pytest.mark.parametrize("agent", [PLAIN_AGENT, RECURRENT], ids=["plain", "recurrent"])
def test_served_experience_is_that_of_a_network_of_ones_own_bit_by_bit(agent):
    edges = wires(1)
    actor, handles = make_actor("served", agent, edges)
    role = make_server(edges, agent)
    while len(handles.experience.queue) < 60:
        status = actor.step()
        assert status == WORKED or status.wake_on == (edges.replies[0],)
        role.step()
    for found, expected in zip(handles.experience.queue, local(agent, 60), strict=True):
        assert_equal(found, expected)


@pytest.mark.parametrize("agent", [PLAIN_AGENT, RECURRENT], ids=["plain", "recurrent"])
@pytest.mark.parametrize("cut", [10, 11, 12, 13])
def test_a_served_actor_and_its_server_restored_between_any_two_steps_go_on_to_the_byte(agent, cut):
    edges = wires(1)
    actor, handles = make_actor("served", agent, edges)
    role = make_server(edges, agent)
    sent: list[Experience] = []
    for step in range(200):
        if step == cut:
            sent = list(handles.experience.queue)
            actor_state, role_state = codec.roundtrip(actor.state_dict()), codec.roundtrip(role.state_dict())
            actor, handles = make_actor("served", agent, edges)
            role = make_server(edges, agent)
            actor.load_state_dict(actor_state)
            role.load_state_dict(role_state)
        (actor if step % 2 else role).step()
    sent += handles.experience.queue
    assert len(sent) > 20
    for found, expected in zip(sent, local(agent, len(sent)), strict=True):
        assert_equal(found, expected)


def test_two_served_actors_share_batches_and_choose_as_they_would_alone():
    edges = wires(2)
    pair = [make_actor("served", PLAIN_AGENT, edges, index=index, actors=2) for index in range(2)]
    role = make_server(edges, PLAIN_AGENT)
    for _ in range(60):
        for actor, _ in pair:
            actor.step()
        role.step()
    assert role.metrics()["inference_batch"] == 8
    for index, (_, handles) in enumerate(pair):
        alone, expected = make_actor("local", PLAIN_AGENT, edges, index=index, actors=2)
        for _ in handles.experience.queue:
            alone.step()
        assert len(handles.experience.queue) >= 20
        for found, wanted in zip(handles.experience.queue, expected.experience.queue, strict=True):
            assert_equal(found, wanted, tolerance=1e-6)


@pytest.mark.parametrize("kind", ["local", "served"])
def test_acting_in_16_bits_has_nearly_the_same_values(kind):
    edges = wires(1)
    actor, handles = make_actor(kind, PLAIN_AGENT, edges, precision="bf16")
    role = make_server(edges, PLAIN_AGENT, precision="bf16")
    while not handles.experience.queue:
        actor.step()
        role.step()
    (found,), (expected,) = handles.experience.queue, local(PLAIN_AGENT, 1)
    assert 0 < np.abs(found.best - expected.best).max() < 0.02


@pytest.mark.parametrize("kind", ["local", "served"])
@pytest.mark.parametrize("restored", [False, True])
def test_acting_in_16_bits_is_by_the_newest_weights(kind, restored):
    """Weights are rounded once for each version: those of an older one must not stay."""

    def pair():
        edges = wires(1)
        return make_actor(kind, PLAIN_AGENT, edges, precision="bf16"), make_server(edges, PLAIN_AGENT, precision="bf16")

    def best_of_next(actor, handles, role):
        handles.experience.queue.clear()
        while not handles.experience.queue:
            actor.step()
            role.step()
        return handles.experience.queue[0].best

    (actor, handles), role = pair()
    before = best_of_next(actor, handles, role)
    holder = handles.weights if kind == "local" else role._handles.weights
    larger = weights_of(5, 2, PLAIN_AGENT, SPEC).flat * 3
    holder.publish(Weights(Version(0, 2), larger, checksum(larger), 0))
    after = best_of_next(actor, handles, role)
    assert np.abs(after).mean() > 2 * np.abs(before).mean()
    if restored:
        states = codec.roundtrip(actor.state_dict()), codec.roundtrip(role.state_dict())
        (other, others), server_ = pair()
        for edge in (others.weights, server_._handles.weights):
            if edge is not None:
                edge.queue.clear()
        other.load_state_dict(states[0])
        server_.load_state_dict(states[1])
        np.testing.assert_array_equal(best_of_next(other, others, server_), best_of_next(actor, handles, role))


def test_while_one_group_waits_for_its_values_the_other_one_steps():
    edges = wires(2)
    actor, handles = make_actor("served", PLAIN_AGENT, edges, groups=2)
    role = make_server(edges, PLAIN_AGENT)
    assert [actor.step(), type(actor.step())] == [WORKED, Idle]
    assert [len(edge.queue) for edge in edges.requests] == [1, 1]
    kept = edges.requests[1].receive()  # the second group's request is slow
    role.step()
    assert [actor.step(), type(actor.step())] == [WORKED, Idle]
    assert handles.env_steps.count == 2  # the first group has stepped, and its next request is away
    assert len(edges.requests[0].queue) == 1
    edges.requests[1].send(kept)
    while not handles.experience.queue:
        role.step()
        actor.step()
    assert handles.env_steps.count == 2 * 2 * 2
    actor.close()


def test_a_run_that_ends_within_a_message_sends_what_is_written_and_closes_every_stream():
    edges = wires(1)
    actor, handles = make_actor("served", PLAIN_AGENT, edges, env_steps=8, unroll=4)
    role = make_server(edges, PLAIN_AGENT)
    while (status := actor.step()) != DONE:
        assert status == WORKED or isinstance(status, Idle)
        role.step()
    (message,) = handles.experience.queue
    assert np.count_nonzero(~message.final) == handles.env_steps.count == 8
    assert handles.experience.closed
    assert edges.requests[0].closed
    assert role.step() == DONE


def test_a_served_actor_that_is_put_to_sleep_uses_what_it_has_asked_for_and_wakes_where_it_was():
    edges = wires(2)
    actor, handles = make_actor("served", PLAIN_AGENT, edges, groups=2)
    role = make_server(edges, PLAIN_AGENT)

    def go(rounds: int) -> list[Experience]:
        for _ in range(rounds):
            actor.step()
            role.step()
        return [handles.experience.receive() for _ in range(len(handles.experience.queue))]

    assert go(10)
    handles.orders.publish(Orders((0,)))
    go(10)
    assert actor.step().reason == "not needed now"
    assert go(5) == []
    assert not any(edge.queue for edge in edges.requests)
    handles.orders.publish(Orders((4,)))
    assert {int(stream) for message in go(10) for stream in message.stream} == {0, 1, 2, 3}


def test_a_group_whose_values_are_there_steps_while_the_other_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = wires(2)
    actor, _ = make_actor("served", PLAIN_AGENT, edges, groups=2)
    helper = make_server(edges, PLAIN_AGENT)
    done: list[str] = []
    send, receive, add = actor._env.send, actor._env.receive, actor._recorder.add

    def answering_meanwhile() -> Any:
        part = receive()
        helper.step()
        return part

    monkeypatch.setattr(actor._env, "send", lambda action, envs: (done.append(f"send {envs[0]}"), send(action, envs)))
    monkeypatch.setattr(actor._env, "receive", answering_meanwhile)
    monkeypatch.setattr(actor._recorder, "add", lambda *parts: (done.append(f"write {parts[-1][0]}"), add(*parts)))
    assert actor.step() == WORKED  # asks for both
    kept = edges.requests[1].queue.pop()
    helper.step()  # answers the first alone
    edges.requests[1].queue.append(kept)
    actor.step()
    assert done[:3] == ["send 0", "send 2", "write 0"]
    actor.close()


def test_values_that_come_while_a_group_steps_are_acted_on_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edges = wires(2)
    actor, _ = make_actor("served", PLAIN_AGENT, edges, groups=2)
    helper = make_server(edges, PLAIN_AGENT)
    done: list[str] = []
    send, receive = actor._env.send, actor._env.receive
    slow = iter([False, True])  # the first group steps until the other's values have come
    monkeypatch.setattr(actor._env, "send", lambda action, envs: (done.append(f"send {envs[0]}"), send(action, envs)))
    monkeypatch.setattr(actor._env, "receive", lambda: (done.append("receive"), receive())[1])
    monkeypatch.setattr(actor._env, "ready", lambda: next(slow, True))
    monkeypatch.setattr(actor._env, "wait", lambda others: (done.append(f"wait {len(others)}"), helper.step()))
    assert actor.step() == WORKED  # asks for both
    kept = edges.requests[1].queue.pop()
    helper.step()  # answers the first alone
    edges.requests[1].queue.append(kept)
    actor.step()
    assert done[:4] == ["send 0", "wait 2", "send 2", "receive"]
    actor.close()
