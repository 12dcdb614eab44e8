"""Acting: every environment has a memory of its own, whoever acts beside it, and rows carry the memory before them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from role_cases import SPEC, Edge

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.exploration import EpsilonGreedyConfig, choose
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.recurrent import MemoryConfig
from qfleet.algo.sequences import LAST_ACTION, STATE, stored
from qfleet.algo.torsos import MlpConfig
from qfleet.core.spec import PLAIN
from qfleet.core.usercode import UserCode
from qfleet.envs import GymConfig, env_spec
from qfleet.roles.acting import Acting
from qfleet.roles.actor import Actor, ActorConfig, ActorHandles, ActorSetup

NETWORK = MlpConfig(hidden=(8,), activation="tanh")
RECURRENT = ReplayAgent(memory=MemoryConfig(hidden=4, length=4, burn_in=2, period=2))
GREEDY = np.zeros(3, np.float32)


def network_of(agent: ReplayAgent) -> QNetwork:
    return build_network(NETWORK, agent, SPEC, seed=1)


def test_without_memory_it_is_the_networks_choice():
    network, seen = network_of(ReplayAgent()), np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    epsilon = np.full(3, 0.5, np.float32)
    choice = Acting(network, 3).act({PLAIN: seen}, None, epsilon, np.random.default_rng(1))
    with torch.no_grad():
        q = network.q({PLAIN: torch.from_numpy(seen)}).numpy()
    np.testing.assert_array_equal(choice.q, q)
    np.testing.assert_array_equal(choice.action, choose(q, epsilon, None, np.random.default_rng(1)))
    assert choice.extras == {}


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), ticks=st.integers(1, 8))
def test_an_environments_memory_is_its_own_history_whoever_acts_beside_it(seed, ticks):
    rng, network = np.random.default_rng(seed), network_of(RECURRENT)
    acting, alone = Acting(network, 3), [network.initial_state(1) for _ in range(3)]
    for _ in range(ticks):
        envs = np.flatnonzero(rng.random(3) < 0.7)
        seen = rng.normal(size=(len(envs), 3)).astype(np.float32)
        choice = acting.act({PLAIN: seen}, None, GREEDY[envs], rng, envs)
        for row, env in enumerate(envs):
            expected = stored(alone[env].numpy())
            np.testing.assert_allclose(choice.extras[STATE][row], expected[STATE][0], atol=1e-3)
            assert choice.extras[LAST_ACTION][row] == expected[LAST_ACTION][0]
            with torch.no_grad():
                q, alone[env] = network.recall({PLAIN: torch.from_numpy(seen[row : row + 1])}, alone[env])
            np.testing.assert_allclose(choice.q[row], q[0], atol=1e-5)
            alone[env][0, -1] = int(choice.action[row]) + 1
        ended = rng.random(3) < 0.2
        acting.forget(ended)
        for env in np.flatnonzero(ended):
            alone[env] = network.initial_state(1)


def test_a_saved_memory_goes_on():
    network, rng = network_of(RECURRENT), np.random.default_rng(0)
    seen = rng.normal(size=(4, 3, 3)).astype(np.float32)
    whole = Acting(network, 3)
    choices = [whole.act({PLAIN: one}, None, GREEDY, rng) for one in seen]
    part, rest = Acting(network, 3), Acting(network, 3)
    for one in seen[:2]:
        part.act({PLAIN: one}, None, GREEDY, rng)
    rest.load_state_dict(part.state_dict())
    part.act({PLAIN: seen[0]}, None, GREEDY, rng)  # must not reach into what was saved
    for one, expected in zip(seen[2:], choices[2:], strict=True):
        np.testing.assert_array_equal(rest.act({PLAIN: one}, None, GREEDY, rng).q, expected.q)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "qfleet/Recall-v0"])
def test_an_actors_rows_carry_the_memory_that_their_episode_leads_to(env_id):
    env = GymConfig(id=env_id)
    setup = ActorSetup(
        actor=ActorConfig(envs=3, unroll=10),
        env=env,
        spec=env_spec(env),
        network=NETWORK,
        agent=RECURRENT,
        exploration=EpsilonGreedyConfig(start=0.5, end=0.5),
        seed=0,
        index=0,
        actors=1,
        env_steps=10_000,
        code=UserCode(),
    )
    handles = ActorHandles(experience=Edge(), weights=Edge(), env_steps=Edge())
    actor = Actor(setup, handles)
    for _ in range(10):
        actor.step()
    network = build_network(NETWORK, RECURRENT, setup.spec, seed=0)
    states = {stream: network.initial_state(1) for stream in range(3)}
    episodes = 0
    for message in handles.experience.queue:
        for row, stream in enumerate(message.stream.tolist()):
            if message.final[row]:
                states[stream], episodes = network.initial_state(1), episodes + 1
                assert not message.extras[STATE][row].any()
                continue
            expected = stored(states[stream].numpy())
            np.testing.assert_allclose(message.extras[STATE][row], expected[STATE][0], atol=2e-3)
            assert message.extras[LAST_ACTION][row] == expected[LAST_ACTION][0]
            with torch.no_grad():
                seen = {PLAIN: torch.from_numpy(message.observation[PLAIN][row : row + 1])}
                _, states[stream] = network.recall(seen, states[stream])
            states[stream][0, -1] = int(message.action[row]) + 1
    assert episodes >= 5
