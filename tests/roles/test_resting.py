"""Environments that rest: none is lost or acted for, whoever is slow rests first, and streams go on where they were."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from role_cases import Edge
from test_actor_groups import check_chain, messages, rows_of
from walk_env import Walk

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.exploration import EpsilonGreedyConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.core.codec import roundtrip
from qfleet.core.role import DONE, Idle
from qfleet.core.types import Orders
from qfleet.core.usercode import UserCode
from qfleet.envs import GymConfig, env_spec
from qfleet.roles.actor import Actor, ActorConfig, ActorHandles, ActorSetup
from qfleet.roles.resting import Waiting

WAYS = [("sync", 1), ("sync", 2), ("async", 2)]
"""How a vector is stepped: as a whole, by groups, whoever is ready."""


@given(st.data(), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_whatever_is_ordered_nobody_is_lost_and_only_those_awake_are_in_line(data, envs, parts):
    units = [unit for unit in np.array_split(np.arange(envs), parts) if len(unit)]
    waiting, away = Waiting(units, units), []
    for _ in range(data.draw(st.integers(1, 12))):
        seconds = np.array(data.draw(st.lists(st.floats(0, 1), min_size=envs, max_size=envs)))
        if data.draw(st.booleans()):
            wanted = data.draw(st.integers(0, envs))
            waiting.order(wanted, seconds)
            awake = int(waiting.awake.sum())
            assert (awake == 0) == (wanted == 0)
            assert awake <= wanted or awake in {len(unit) for unit in units}
            assert all(len(set(waiting.awake[unit])) == 1 for unit in units), "units rest together"
        elif len(waiting) and data.draw(st.booleans()):
            envs_in_line = waiting.pop()
            assert waiting.awake[envs_in_line].all()
            away.append(envs_in_line)
        elif away:
            waiting.join(away.pop())
    waiting.order(envs, np.zeros(envs))
    left = [waiting.pop() for _ in range(len(waiting))]
    assert sorted(np.concatenate([*left, *away]).tolist()) == list(range(envs))


def test_the_slowest_rest_first_and_those_awake_stay_so():
    waiting = Waiting(list(np.arange(4)[:, None]), [np.arange(4)])
    waiting.order(2, np.array([0.1, 0.9, 0.2, 0.3]))
    assert waiting.awake.tolist() == [True, False, True, False]
    waiting.order(2, np.array([0.5, 0.1, 0.5, 0.1]))
    assert waiting.awake.tolist() == [True, False, True, False]
    waiting.order(3, np.array([0.5, 0.1, 0.5, 0.3]))
    assert waiting.awake.tolist() == [True, True, True, False]


def test_the_load_names_the_slow_ones_of_those_awake():
    waiting = Waiting(list(np.arange(4)[:, None]), [np.arange(4)])
    waiting.order(3, np.array([0.1, 0.1, 0.1, 0.9]))
    even = {"acting_envs": 3, "envs_together": 1, "slow_envs": 0}
    assert waiting.load(np.array([1.0, 1.0, 2.9, 9.0])) == even
    slow = {"slow_env": 2, "slow_s": 9.0, "usual_s": 1.0}
    assert waiting.load(np.array([1.0, 1.0, 9.0, 9.0])) == {**even, "slow_envs": 1, **slow}


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([0, 0, 0, 0], 0),  # nobody can tell
        ([0, 0, 0, 1], 0),  # nor can one that was never heard of be compared with
        ([1, 1, 1, 10], 1),
        ([1, 1, 10, 10], 2),
        ([1, 10, 10, 10], 0),  # that is one fast one
        ([1, 10], 1),
        ([10], 0),
    ],
)
def test_slow_is_who_takes_much_longer_than_the_fastest_quarter(seconds, slow):
    units = list(np.arange(len(seconds))[:, None])
    assert Waiting(units, units).load(np.array(seconds, float))["slow_envs"] == slow


def test_environments_that_are_given_up_do_not_act_and_their_rest_relieves_nobody():
    waiting = Waiting(list(np.arange(4)[:, None]), [np.arange(4)])
    seconds = np.array([0.1, 9.0, 0.9, 0.1])
    assert waiting.load(seconds, [1]).items() >= {"acting_envs": 3, "envs_together": 1, "slow_envs": 1}.items()
    waiting.order(3, seconds, [1])
    assert waiting.awake.tolist() == [True, True, False, True], "the slow one rests that acts"
    assert waiting.load(seconds, [1]).items() >= {"acting_envs": 2, "envs_together": 1, "slow_envs": 0}.items()
    waiting.order(1, seconds, [1])
    assert waiting.awake.tolist() == [True, False, False, False], "one that acts stays awake"
    together = Waiting([np.arange(2)], [np.arange(2)])
    together.order(1, seconds[:2], [0, 1])
    assert together.load(seconds[:2], [0, 1])["acting_envs"] == 0


def make_actor(way: tuple[str, int], env_steps: int = 10**6) -> tuple[Actor, ActorHandles]:
    env = GymConfig(id="walk", vectorisation=way[0])
    setup = ActorSetup(
        actor=ActorConfig(envs=4, unroll=2, groups=way[1]),
        env=env,
        spec=env_spec(env, Walk),
        network=MlpConfig(hidden=(8,)),
        agent=ReplayAgent(),
        exploration=EpsilonGreedyConfig(start=0.5, end=0.5),
        seed=0,
        index=1,
        actors=2,
        env_steps=env_steps,
        code=UserCode(env=Walk),
    )
    handles = ActorHandles(experience=Edge(), weights=Edge(), env_steps=Edge(), orders=Edge())
    return Actor(setup, handles), handles


def rest(handles: ActorHandles, envs: int) -> None:
    handles.orders.publish(Orders((4, envs)))


def told(actor: Actor, handles: ActorHandles) -> list:
    """Step until the actor waits for orders; returns what it sent."""
    for _ in range(100):
        if isinstance(status := actor.step(), Idle) and status.reason == "not needed now":
            assert status.deadline
            return [handles.experience.receive() for _ in range(len(handles.experience.queue))]
    raise AssertionError("it does not come to rest")


@pytest.mark.parametrize("way", WAYS)
def test_an_actor_without_environments_awake_sends_what_was_under_way_and_goes_on_when_it_is_needed(way):
    actor, handles = make_actor(way)
    with closing(actor):
        sent = messages(actor, handles, 10)
        rest(handles, 0)
        sent += told(actor, handles)
        assert actor.metrics()["acting_envs"] == 0
        assert told(actor, handles) == []
        assert handles.env_steps.count == sum(int(np.count_nonzero(~message.final)) for message in sent)
        rest(handles, 4)
        sent += messages(actor, handles, 20)
    assert [check_chain(rows_of(sent, 4 + env)) for env in range(4)] == [0] * 4
    assert [message.sequence for message in sent] == list(range(len(sent)))


@pytest.mark.parametrize("way", WAYS[1:])
def test_streams_of_environments_that_rest_stay_open_and_go_on_where_they_were(way):
    actor, handles = make_actor(way)
    with closing(actor):
        sent = messages(actor, handles, 10)
        rest(handles, 2)
        sent += messages(actor, handles, 4)  # what was under way
        assert actor.metrics()["acting_envs"] == 2
        half = messages(actor, handles, 10)
        assert len({int(stream) for message in half for stream in message.stream}) == 2
        rest(handles, 4)
        sent += half + messages(actor, handles, 20)
    streams = [rows_of(sent, 4 + env) for env in range(4)]
    assert [check_chain(rows) for rows in streams] == [0] * 4
    assert all(len(rows) > 20 for rows in streams)


@pytest.mark.parametrize("way", WAYS)
def test_a_restored_actor_follows_the_orders_that_it_is_given_again(way):
    actor, handles = make_actor(way)
    again, again_handles = make_actor(way)
    with closing(actor), closing(again):
        sent = messages(actor, handles, 10)
        rest(handles, 2 if way[1] > 1 else 0)
        actor.step()
        sent += [handles.experience.receive() for _ in range(len(handles.experience.queue))]
        again.load_state_dict(roundtrip(actor.state_dict()))
        rest(again_handles, 0)
        sent += told(again, again_handles)
        rest(again_handles, 4)
        sent += messages(again, again_handles, 20)
    assert [check_chain(rows_of(sent, 4 + env)) for env in range(4)] == [0] * 4


def test_the_budget_ends_an_actor_that_rests():
    actor, handles = make_actor(WAYS[0], env_steps=100)
    with closing(actor):
        rest(handles, 0)
        told(actor, handles)
        handles.env_steps.add(100)  # by others
        assert actor.step() == DONE
    assert handles.experience.closed
