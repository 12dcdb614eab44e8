"""The actor: it follows the newest weights, counts only real steps, and stops at the run's budget."""

from __future__ import annotations

import numpy as np
import pytest
from role_cases import Edge

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.exploration import EpsilonGreedyConfig
from qfleet.algo.flat import FlatParameters, checksum
from qfleet.algo.networks import build_network
from qfleet.algo.torsos import MlpConfig
from qfleet.core.errors import QfleetError
from qfleet.core.role import DONE, WORKED, Idle
from qfleet.core.types import Experience, Version, Weights
from qfleet.core.usercode import UserCode
from qfleet.envs import GymConfig, env_spec
from qfleet.roles.actor import Actor, ActorConfig, ActorHandles, ActorSetup

ENV = GymConfig(id="CartPole-v1")
NETWORK = MlpConfig(hidden=(8,))


def make_actor(agent=None, env_steps=10_000, epsilon=0.0) -> tuple[Actor, ActorHandles]:
    setup = ActorSetup(
        actor=ActorConfig(envs=4, unroll=2),
        env=ENV,
        spec=env_spec(ENV),
        network=NETWORK,
        agent=agent or ReplayAgent(),
        exploration=EpsilonGreedyConfig(start=epsilon, end=epsilon),
        seed=0,
        index=0,
        actors=1,
        env_steps=env_steps,
        code=UserCode(),
    )
    handles = ActorHandles(experience=Edge(capacity=2), weights=Edge(), env_steps=Edge())
    return Actor(setup, handles), handles


def weights_that_always_choose(action: int, number: int) -> Weights:
    network = build_network(NETWORK, ReplayAgent(), env_spec(ENV), seed=0)
    flat = FlatParameters(network)
    for parameter in network.parameters():
        parameter.data.zero_()
    list(network.parameters())[-1].data[action] = 1.0  # the bias of the last layer
    values = flat.to_numpy()
    return Weights(Version(0, number), values, checksum(values))


@pytest.mark.parametrize("first", [0, 1])
def test_trap_12_the_next_action_is_chosen_by_the_newest_weights(first):
    actor, handles = make_actor()
    for number, action in enumerate((first, 1 - first, first), start=1):
        handles.weights.publish(weights_that_always_choose(action, number))
        assert actor.step() == WORKED
        message: Experience = handles.experience.receive()
        assert set(message.action[~message.final]) == {action}
        assert message.version == Version(0, number)


def test_damaged_weights_are_refused():
    actor, handles = make_actor()
    good = weights_that_always_choose(0, 1)
    handles.weights.publish(Weights(good.version, good.flat + 1, good.checksum))
    with pytest.raises(QfleetError, match="arrived damaged"):
        actor.step()


def test_a_full_stream_stops_the_actor_and_a_taken_message_starts_it_again():
    actor, handles = make_actor()
    assert [actor.step(), actor.step()] == [WORKED, WORKED]
    assert isinstance(actor.step(), Idle)
    assert handles.env_steps.count == 2 * 2 * 4
    handles.experience.receive()
    assert actor.step() == WORKED


def test_the_budget_of_the_run_ends_the_stream():
    actor, handles = make_actor(env_steps=8)
    assert actor.step() == WORKED
    assert actor.step() == DONE
    assert handles.experience.closed


def test_without_replay_each_rollout_waits_for_the_weights_that_the_last_one_made():
    actor, handles = make_actor(agent=RolloutAgent())
    handles.weights.publish(weights_that_always_choose(0, 0))
    assert actor.step() == WORKED
    assert isinstance(actor.step(), Idle)
    handles.weights.publish(weights_that_always_choose(1, 1))
    assert actor.step() == WORKED
    assert [m.version.number for m in handles.experience.queue] == [0, 1]


def test_a_restored_actor_goes_on_with_the_same_experience():
    whole, whole_handles = make_actor(epsilon=0.5)
    sent = []
    for _ in range(40):
        whole.step()
        sent.append(whole_handles.experience.receive())
    part, part_handles = make_actor(epsilon=0.5)
    for _ in range(17):
        part.step()
        part_handles.experience.receive()
    rest, rest_handles = make_actor(epsilon=0.5)
    rest.load_state_dict(part.state_dict())
    for expected in sent[17:]:
        rest.step()
        found = rest_handles.experience.receive()
        assert found.sequence == expected.sequence
        assert np.array_equal(found.action, expected.action)
        assert np.array_equal(found.observation["observation"], expected.observation["observation"])
