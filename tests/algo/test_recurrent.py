"""Memory: one step at a time equals whole sequences, burn-in stops gradients, and rescaling can be undone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algo_cases import MIXED, PIXELS, VECTOR, leaves
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.batch import leaves_to_tensors
from qfleet.algo.heads import QuantileConfig
from qfleet.algo.model_io import ModelConfigs, load_model, save_model
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.policy import Policy
from qfleet.algo.recurrent import MemoryConfig, rescaled, unscaled
from qfleet.algo.torsos import MlpConfig, NatureConfig, SmallCnnConfig
from qfleet.core.spec import PLAIN, EnvSpec

CPU = torch.device("cpu")
SMALL = MemoryConfig(hidden=8, length=4, burn_in=2, period=2)


def make(spec: EnvSpec = VECTOR, memory: MemoryConfig = SMALL, network=None, **agent) -> QNetwork:
    return build_network(
        network or MlpConfig(hidden=(6, 5), activation="tanh"), ReplayAgent(memory=memory, **agent), spec, seed=3
    )


def stepped(network: QNetwork, observation, action, state):
    """Values [B, T, A] and memories [B, T, S] before each step, by `recall` alone."""
    values, states = [], []
    for t in range(action.shape[1]):
        states.append(state)
        q, state = network.recall({name: leaf[:, t] for name, leaf in observation.items()}, state)
        state[:, -1] = action[:, t] + 1
        values.append(q)
    return torch.stack(values, 1), torch.stack(states, 1)


@pytest.mark.parametrize(
    ("spec", "network", "last_action", "dueling"),
    [
        (VECTOR, MlpConfig(hidden=(6, 5), activation="tanh"), True, True),
        (VECTOR, MlpConfig(hidden=()), False, False),
        (MIXED, SmallCnnConfig(channels=(3,), dense=4), True, False),
        (PIXELS, NatureConfig(dense=8), True, True),
    ],
)
@pytest.mark.parametrize("burn_in", [0, 2])
def test_a_sequence_has_the_values_of_its_steps_one_by_one(spec, network, last_action, dueling, burn_in):
    rng = np.random.default_rng(0)
    net = make(spec, SMALL.replace(last_action=last_action), network, dueling=dueling)
    observation = leaves_to_tensors(leaves(spec, rng, 3, 5), CPU)
    action = torch.from_numpy(rng.integers(0, spec.actions, (3, 5)))
    state = torch.from_numpy(rng.normal(size=(3, 17)).astype(np.float32))
    state[:, -1] = torch.tensor([0, 1, 2])
    with torch.no_grad():
        expected, states = stepped(net, observation, action, state)
        found = net.unroll(
            observation, states[:, :, -1].long(), state[:, :-1], burn_in, torch.ones(3, dtype=torch.bool)
        )
    torch.testing.assert_close(unscaled(found), expected, atol=1e-5, rtol=1e-5)
    assert (states[:, 1:, -1] == action[:, :-1] + 1).all()


def test_what_was_seen_and_done_before_changes_the_values_and_a_zero_state_forgets_it():
    net, zeros = make(), make().initial_state(2)
    one, other = torch.zeros(2, 4), torch.zeros(2, 4)
    other[1] = 1
    q, after = net.recall({PLAIN: other}, zeros)
    assert not torch.equal(q[0], q[1])
    later, _ = net.recall({PLAIN: one}, after)
    assert not torch.equal(later[0], later[1])
    after[1] = after[0]
    after[1, -1] = 2
    by_action, _ = net.recall({PLAIN: one}, after)
    assert not torch.equal(by_action[0], by_action[1])
    deaf, _ = make(memory=SMALL.replace(last_action=False)).recall({PLAIN: one}, after)
    assert torch.equal(deaf[0], deaf[1])
    assert torch.equal(net.recall({PLAIN: one}, zeros)[0][0], net.recall({PLAIN: one}, net.initial_state(2))[0][0])


def test_no_last_action_adds_nothing():
    net, observation = make(), {PLAIN: torch.ones(1, 4)}
    done = net.initial_state(1)
    done[0, -1] = 3
    before = [net.recall(observation, state)[0] for state in (net.initial_state(1), done)]
    with torch.no_grad():
        net.memory.lstm.weight_ih_l0[:, -3:] += 1  # the weights of the three actions
    after = [net.recall(observation, state)[0] for state in (net.initial_state(1), done)]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_burn_in_gets_no_gradient_unless_there_is_nothing_to_burn_in():
    net = make()
    observation = torch.randn(2, 5, 4, requires_grad=True)
    warm = torch.tensor([False, True])
    values = net.unroll({PLAIN: observation}, torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 16), 2, warm)
    values[:, 2:].sum().backward()
    reached = observation.grad.abs().sum(2) > 0
    assert reached.tolist() == [[False, False, True, True, True], [True] * 5]


def test_a_network_with_memory_has_no_values_without_its_state():
    with pytest.raises(TypeError, match="needs its state"):
        make().q({PLAIN: torch.zeros(1, 4)})
    assert make().recurrent
    assert not build_network(MlpConfig(), ReplayAgent(), VECTOR, 0).recurrent


def test_the_forget_gates_begin_open():
    bias = make().state_dict()["memory.lstm.bias_ih_l0"]
    assert bias[8:16].tolist() == [1.0] * 8
    assert bias.abs().max() <= 1


@pytest.mark.parametrize("wrong", [{"head": QuantileConfig()}, {"munchausen": {}}])
def test_memory_is_for_plain_values(wrong):
    with pytest.raises(ValueError, match="memory"):
        ReplayAgent(memory=SMALL, **wrong)


def test_a_period_beyond_the_length_would_skip_steps():
    with pytest.raises(ValueError, match="skipped"):
        MemoryConfig(length=4, period=5)


@settings(deadline=None, max_examples=100)
@given(st.floats(-1e6, 1e6))
def test_rescaling_can_be_undone(value):
    x = torch.tensor(value, dtype=torch.float64)
    assert unscaled(rescaled(x)).item() == pytest.approx(value, rel=1e-9, abs=1e-9)
    single = torch.tensor(value, dtype=torch.float32)
    assert unscaled(rescaled(single)).item() == pytest.approx(single.item(), rel=1e-5, abs=1e-6)


def test_rescaling_is_the_published_function():
    x = torch.tensor([-3.0, 0.0, 3.0, 99.0], dtype=torch.float64)
    torch.testing.assert_close(rescaled(x), torch.tensor([-1.003, 0.0, 1.003, 9.099], dtype=torch.float64))


def test_a_saved_model_remembers(tmp_path):
    agent, network = ReplayAgent(memory=SMALL), MlpConfig(hidden=(6, 5), activation="tanh")
    net = build_network(network, agent, VECTOR, 1)
    save_model(tmp_path, net, VECTOR, ModelConfigs(network=network, agent=agent), {})
    saved, given = Policy(net, VECTOR), load_model(tmp_path)
    loaded = Policy(given.network, given.spec)
    observations = leaves(VECTOR, np.random.default_rng(0), 6, 3)[PLAIN]
    ours, theirs = saved.initial_state(3), loaded.initial_state(3)
    for observation in observations:
        np.testing.assert_array_equal(saved.q(observation, ours), loaded.q(observation, theirs))
        actions, ours = saved.act(observation, ours)
        repeated, theirs = loaded.act(observation, theirs)
        np.testing.assert_array_equal(actions, repeated)
        np.testing.assert_array_equal(ours[:, -1], actions + 1)
    assert not np.array_equal(ours, saved.initial_state(3))


def test_policies_with_memory_ask_for_their_state_and_check_it():
    policy = Policy(make(), VECTOR)
    with pytest.raises(ValueError, match=r"initial_state\(n\)"):
        policy.act(np.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"\(3, 17\)"):
        policy.act(np.zeros((3, 4)), policy.initial_state(2))
    action, state = policy.act(np.zeros(4), policy.initial_state(1))
    assert np.ndim(action) == 0
    assert state.shape == (1, 17)


def test_a_policy_keeps_the_state_that_it_was_given_and_masks_what_it_may_not_do():
    policy = Policy(make(VECTOR.replace(masked=True)), VECTOR)
    state, mask = policy.initial_state(2), np.array([[True, False, False], [False, False, True]])
    actions, after = policy.act(np.zeros((2, 4)), state, mask=mask)
    assert actions.tolist() == [0, 2]
    assert not state.any()
    assert after[:, -1].tolist() == [1, 3]
