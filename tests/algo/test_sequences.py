"""The loss of sequences equals a loop over their steps, and nothing beyond an episode's end has a part in it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from algo_cases import VECTOR, leaves, random_masks
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.algo.agent import HardTargetConfig, ReplayAgent, SoftTargetConfig
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.optim import SgdConfig
from qfleet.algo.recurrent import MemoryConfig
from qfleet.algo.sequence_updates import SequenceUpdate
from qfleet.algo.sequences import LAST_ACTION, STATE, first_priorities, sequence_loss, sequence_tensors, stored
from qfleet.algo.torsos import MlpConfig
from qfleet.algo.updates import build_update
from qfleet.core.spec import PLAIN
from qfleet.core.types import SequenceBatch

CPU = torch.device("cpu")
ACTIONS, HIDDEN = VECTOR.actions, 6
FOREVER = SoftTargetConfig(tau=1e-9)


def agent_of(length: int = 4, burn_in: int = 2, **parts) -> ReplayAgent:
    memory = MemoryConfig(hidden=HIDDEN, length=length, burn_in=burn_in, period=1)
    return ReplayAgent(**{"memory": memory, "double": True, "n_step": 2, "target": FOREVER, **parts})


def network_of(agent: ReplayAgent, seed: int) -> QNetwork:
    return build_network(MlpConfig(hidden=(5,), activation="tanh"), agent, VECTOR, seed)


def make_sequences(rng: np.random.Generator, steps: list[int], length: int, ends: str, fresh: list[bool], masked=False):
    """Sequences of `length` rows, of which the first `steps` [B] are valid; `ends` says how the short ones ended."""
    size = len(steps)
    valid = np.arange(length) < np.array(steps)[:, None]
    terminated = np.zeros((size, length), bool)
    for row, count in enumerate(steps):
        terminated[row, count - 1] = ends == "terminated"
    state = rng.normal(size=(size, 2 * HIDDEN)).astype(np.float16)
    last = rng.integers(1, ACTIONS + 1, size).astype(np.int32)
    state[np.array(fresh)], last[np.array(fresh)] = 0, 0
    return SequenceBatch(
        observation=leaves(VECTOR, rng, size, length + 1),
        action=rng.integers(0, ACTIONS, (size, length)),
        reward=(5 * rng.normal(size=(size, length))).astype(np.float32),
        terminated=terminated,
        valid=valid,
        extras={STATE: state, LAST_ACTION: last},
        weight=rng.uniform(0.1, 1, size).astype(np.float32),
        index=np.arange(size),
        generation=np.zeros(size, np.int64),
        mask=random_masks(rng, size, length + 1, ACTIONS) if masked else None,
    )


def h(x: float) -> float:
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x


def values_of(network: QNetwork, batch: SequenceBatch, row: int) -> np.ndarray:
    """Values [L + 1, A] in the reward's unit, one observation after the other."""
    state = np.concatenate([batch.extras[STATE][row], batch.extras[LAST_ACTION][row : row + 1]]).astype(np.float32)
    state, found = torch.from_numpy(state)[None], []
    for t, observation in enumerate(batch.observation[PLAIN][row]):
        with torch.no_grad():
            q, state = network.recall({PLAIN: torch.from_numpy(observation)[None]}, state)
        state[:, -1] = int(batch.action[row, t]) + 1 if t < batch.action.shape[1] else 0
        found.append(q[0].double().numpy())
    return np.array(found)


def by_hand(agent: ReplayAgent, online: QNetwork, target: QNetwork, batch: SequenceBatch, row: int):
    """Mean error and priority of one sequence, step by step in float64, from the published definitions."""
    own, other = values_of(online, batch, row), values_of(target, batch, row)
    steps, burn_in = int(batch.valid[row].sum()), agent.memory.burn_in
    first = 0 if batch.extras[LAST_ACTION][row] == 0 else burn_in
    losses, sizes = [], []
    for t in range(first, steps):
        goal, reach = 0.0, min(agent.n_step, steps - t)
        for k in range(reach):
            goal += agent.gamma**k * float(batch.reward[row, t + k])
        if not batch.terminated[row, t + reach - 1]:
            choosing = (own if agent.double else other)[t + reach].copy()
            if batch.mask is not None:
                choosing[~batch.mask[row, t + reach]] = -np.inf
            goal += agent.gamma**reach * other[t + reach][choosing.argmax()]
        error = abs(h(own[t][batch.action[row, t]]) - h(goal))
        losses.append(0.5 * error**2 if error <= 1 or agent.loss == "mse" else error - 0.5)
        sizes.append(error)
    if not sizes:
        return 0.0, 0.0
    return np.mean(losses), agent.memory.eta * max(sizes) + (1 - agent.memory.eta) * np.mean(sizes)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 5),
    burn_in=st.integers(0, 3),
    n_step=st.integers(1, 7),
    double=st.booleans(),
    masked=st.booleans(),
    loss=st.sampled_from(["huber", "mse"]),
    ends=st.sampled_from(["terminated", "truncated"]),
)
def test_the_loss_equals_a_loop_over_steps(seed, length, burn_in, n_step, double, masked, loss, ends):
    rng = np.random.default_rng(seed)
    agent = agent_of(length, burn_in, n_step=n_step, double=double, loss=loss, gamma=0.9)
    online, target = network_of(agent, 1), network_of(agent, 2)
    total = length + burn_in
    steps = rng.integers(1, total + 1, 4).tolist()
    batch = make_sequences(rng, steps, total, ends, (rng.random(4) < 0.5).tolist(), masked)
    found = sequence_loss(agent, online, target, sequence_tensors(batch, CPU))
    expected = [by_hand(agent, online, target, batch, row) for row in range(4)]
    np.testing.assert_allclose(found.per_sample.detach(), [e[0] for e in expected], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(found.priority, [e[1] for e in expected], rtol=2e-4, atol=2e-5)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 5),
    burn_in=st.integers(0, 3),
    n_step=st.integers(1, 7),
    masked=st.booleans(),
    ends=st.sampled_from(["terminated", "truncated"]),
)
def test_the_values_of_an_actor_give_the_priorities_that_a_learner_would(seed, length, burn_in, n_step, masked, ends):
    rng, total = np.random.default_rng(seed), length + burn_in
    agent = agent_of(length, burn_in, n_step=n_step, gamma=0.9)
    network, steps = network_of(agent, 1), rng.integers(1, total + 1, 4).tolist()
    batch = make_sequences(rng, steps, total, ends, (rng.random(4) < 0.5).tolist(), masked)
    values = np.stack([values_of(network, batch, row) for row in range(4)]).astype(np.float32)
    allowed = values if batch.mask is None else np.where(batch.mask, values, -np.inf)
    taken = np.take_along_axis(values[:, :-1], batch.action[..., None], 2)[..., 0]
    found = first_priorities(agent, dataclasses.replace(batch, observation={}, mask=None), taken, allowed.max(2))
    expected = [by_hand(agent, network, network, batch, row)[1] for row in range(4)]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def loss_and_gradient(agent, batch, target_seed=2):
    online, target = network_of(agent, 1), network_of(agent, target_seed)
    loss = sequence_loss(agent, online, target, sequence_tensors(batch, CPU))
    loss.per_sample.sum().backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    return loss.per_sample.detach(), torch.cat([p.grad.flatten() for p in online.parameters()])


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_nothing_after_the_end_counts(ends):
    rng, agent = np.random.default_rng(0), agent_of(n_step=3)
    batch = make_sequences(rng, [3, 4, 6], 6, ends, [True, False, False], masked=True)
    other = make_sequences(rng, [3, 4, 6], 6, ends, [True, False, False], masked=True)
    observation, mask = batch.observation[PLAIN].copy(), batch.mask.copy()
    action, reward = batch.action.copy(), batch.reward.copy()
    for row, steps in enumerate([3, 4, 6]):
        # The observation at `steps` is the one after the episode's end: needed to bootstrap from, unless terminated.
        after = steps + (ends == "truncated")
        observation[row, after:], mask[row, after:] = other.observation[PLAIN][row, after:], other.mask[row, after:]
        action[row, steps:], reward[row, steps:] = other.action[row, steps:], other.reward[row, steps:]
    changed = dataclasses.replace(batch, observation={PLAIN: observation}, mask=mask, action=action, reward=reward)
    for found, expected in zip(loss_and_gradient(agent, changed), loss_and_gradient(agent, batch), strict=True):
        assert torch.equal(found, expected)


def test_a_truncated_episode_bootstraps_and_a_terminated_one_does_not():
    agent = agent_of(length=3, burn_in=0, n_step=1, gamma=0.5)
    for ends in ("truncated", "terminated"):
        batch = make_sequences(np.random.default_rng(1), [3, 3], 3, ends, [True, True])
        observation = batch.observation[PLAIN].copy()
        observation[:, 3] += 1
        changed = dataclasses.replace(batch, observation={PLAIN: observation})
        same = torch.equal(loss_and_gradient(agent, batch)[0], loss_and_gradient(agent, changed)[0])
        assert same == (ends == "terminated")


def test_burn_in_steps_are_learned_from_only_at_an_episodes_start():
    agent, rng = agent_of(length=3, burn_in=2, n_step=1), np.random.default_rng(2)
    batch = make_sequences(rng, [5, 5], 5, "truncated", [True, False])
    reward = batch.reward.copy()
    reward[:, :2] += 1
    before, after = (
        loss_and_gradient(agent, batch)[0],
        loss_and_gradient(agent, dataclasses.replace(batch, reward=reward))[0],
    )
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_pieces_with_their_stored_states_have_the_errors_of_the_whole_episode():
    agent = agent_of(length=6, burn_in=0, n_step=1)
    batch = make_sequences(np.random.default_rng(3), [6], 6, "truncated", [True])
    online = network_of(agent, 1)
    state, states = online.initial_state(1), []
    for t in range(6):
        states.append(state)
        with torch.no_grad():
            _, state = online.recall({PLAIN: torch.from_numpy(batch.observation[PLAIN][:, t])}, state)
        state[:, -1] = int(batch.action[0, t]) + 1
    whole = sequence_loss(agent, online, online, sequence_tensors(batch, CPU)).per_sample.item()
    pieces = []
    for first in (0, 2, 4):
        rows = slice(first, first + 2)
        piece = dataclasses.replace(
            batch,
            observation={PLAIN: batch.observation[PLAIN][:, first : first + 3].copy()},
            **{name: getattr(batch, name)[:, rows].copy() for name in ("action", "reward", "terminated", "valid")},
            extras=stored(states[first].numpy()),
        )
        pieces.append(sequence_loss(agent, online, online, sequence_tensors(piece, CPU)).per_sample.item())
    assert np.mean(pieces) == pytest.approx(whole, rel=2e-3)  # states are stored in 16 bits


def test_16_bits_of_state_change_values_by_less_than_a_thousandth():
    agent, rng = agent_of(), np.random.default_rng(4)
    network, state = network_of(agent, 1), network_of(agent, 1).initial_state(64)
    for _ in range(20):
        observation = {PLAIN: torch.from_numpy(rng.normal(size=(64, 4)).astype(np.float32))}
        with torch.no_grad():
            _, state = network.recall(observation, state)
        state[:, -1] = torch.from_numpy(rng.integers(1, ACTIONS + 1, 64))
    kept = stored(state.numpy())
    rounded = torch.from_numpy(np.concatenate([kept[STATE], kept[LAST_ACTION][:, None]], 1).astype(np.float32))
    with torch.no_grad():
        exact, found = network.recall(observation, state)[0], network.recall(observation, rounded)[0]
    assert 0 < (exact - found).abs().max() < 1e-3 * exact.abs().max()
    assert torch.equal(rounded[:, -1], state[:, -1])


def make_update(agent: ReplayAgent | None = None, seed: int = 1) -> SequenceUpdate:
    agent = agent or agent_of()
    update = build_update(agent, network_of(agent, seed), SgdConfig(lr=0.3), torch.Generator().manual_seed(0))
    assert isinstance(update, SequenceUpdate)
    return update


def batches(count: int, **changes) -> list[SequenceBatch]:
    rng = np.random.default_rng(5)
    made = [make_sequences(rng, [6, 6, 3, 5], 6, "terminated", [False, True, True, False]) for _ in range(count)]
    return [dataclasses.replace(batch, **changes) for batch in made]


def test_updates_lower_the_loss_of_a_batch_and_give_each_sequence_a_priority():
    update, (batch,) = make_update(), batches(1)
    results = [update(batch) for _ in range(200)]
    losses = [result.metrics["loss"].item() for result in results]
    assert losses[-1] < 0.5 * losses[0]
    assert update.updates == 200
    assert results[0].priority.shape == (4,)
    assert (results[0].priority > 0).all()
    assert set(results[0].metrics) == {"loss", "grad_norm", "q_mean"}


def test_importance_weights_and_the_whole_batchs_size_scale_the_gradient():
    (batch,) = batches(1)
    whole, parts = make_update(), make_update()
    whole(batch)
    total = torch.zeros_like(parts.flat.gradients)
    for row in range(4):
        fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        one = {n: v[row : row + 1] if isinstance(v, np.ndarray) else v for n, v in fields.items()}
        one |= {n: {k: leaf[row : row + 1] for k, leaf in fields[n].items()} for n in ("observation", "extras")}
        update = make_update()
        update(SequenceBatch(**{**one, "global_size": 4}))
        total += update.flat.gradients
    torch.testing.assert_close(whole.flat.gradients, total, atol=1e-6, rtol=1e-4)
    heavy = make_update()
    heavy(dataclasses.replace(batch, weight=batch.weight * 2))
    torch.testing.assert_close(heavy.flat.gradients, 2 * whole.flat.gradients, atol=1e-6, rtol=1e-4)


def test_a_non_finite_update_is_skipped_and_changes_nothing():
    update, (batch,) = make_update(), batches(1)
    before = update.flat.to_numpy()
    result = update(dataclasses.replace(batch, reward=batch.reward * np.nan))
    assert (result.updates, result.skipped, result.priority) == (0, 1, None)
    np.testing.assert_array_equal(update.flat.to_numpy(), before)


@pytest.mark.parametrize("noisy", [False, True])
def test_a_saved_update_goes_on_to_the_bit(noisy):
    agent = agent_of(noisy=noisy, target=HardTargetConfig(period=3))
    whole, first, rest = make_update(agent), make_update(agent), make_update(agent, seed=9)
    given = batches(8)
    for batch in given:
        whole(batch)
    for batch in given[:4]:
        first(batch)
    rest.load_state_dict(first.state_dict())
    for batch in given[4:]:
        rest(batch)
    np.testing.assert_array_equal(rest.flat.to_numpy(), whole.flat.to_numpy())
    np.testing.assert_array_equal(rest.target_flat.to_numpy(), whole.target_flat.to_numpy())
    assert not np.array_equal(whole.flat.to_numpy(), whole.target_flat.to_numpy())


def test_the_target_follows_the_online_network():
    update = make_update(agent_of(target=HardTargetConfig(period=3)))
    begin, same = update.target_flat.to_numpy(), []
    for batch in batches(4):
        update(batch)
        target = update.target_flat.to_numpy()
        same.append((np.array_equal(target, begin), np.array_equal(target, update.flat.to_numpy())))
    assert same == [(True, False), (True, False), (False, True), (False, False)]


def test_running_statistics_of_inputs_take_sequences_in():
    agent, (batch,) = agent_of(), batches(1)
    config = MlpConfig(hidden=(5,), activation="tanh", input={"normalize": True})
    network = build_network(config, agent, VECTOR, 1)
    build_update(agent, network, SgdConfig(lr=0.01), torch.Generator())(batch)
    seen = batch.observation[PLAIN].reshape(-1, 4)
    np.testing.assert_allclose(network.torso.inputs.stages[0].mean, seen.mean(0), atol=1e-5)
