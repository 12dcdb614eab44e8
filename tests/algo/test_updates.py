"""Updates: what one message changes, what it must not change, and that a saved update goes on bit by bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from algo_cases import STATES, VECTOR, make_batch, make_rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.algo.agent import (
    HardTargetConfig,
    MunchausenConfig,
    ReplayAgent,
    RolloutAgent,
    SoftTargetConfig,
    TabularAgent,
)
from qfleet.algo.batch import to_tensors
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.heads import CategoricalConfig, ImplicitQuantileConfig, QuantileConfig
from qfleet.algo.inputs import InputConfig
from qfleet.algo.losses import compute_loss
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig, SgdConfig
from qfleet.algo.rollouts import RolloutTensors, rollout_tensors
from qfleet.algo.torsos import MlpConfig, TabularConfig
from qfleet.algo.updates import build_update
from qfleet.core.codec import roundtrip
from qfleet.core.spec import PLAIN
from qfleet.core.types import Rollout, Version

CPU = torch.device("cpu")
SMALL = MlpConfig(hidden=(16, 16))
REPLAY_AGENTS = {
    "dqn": ReplayAgent(),
    "rainbow": ReplayAgent(double=True, dueling=True, noisy=True, head=CategoricalConfig(atoms=11)),
    "qr": ReplayAgent(head=QuantileConfig(quantiles=5), target=SoftTargetConfig(tau=0.1)),
    "miqn": ReplayAgent(
        head=ImplicitQuantileConfig(taus=4, target_taus=4, acting_taus=4, cosines=4), munchausen=MunchausenConfig()
    ),
}


def make(agent, optim=None, network=SMALL, hook=None, spec=VECTOR, gradient=EagerGradient):
    online, generator = build_network(network, agent, spec, 3), torch.Generator().manual_seed(0)
    return build_update(agent, online, optim or AdamConfig(), generator, gradient_hook=hook, gradient=gradient)


def batches(count, masked=False):
    rng = np.random.default_rng(0)
    return [make_batch(VECTOR, rng, masked=masked) for _ in range(count)]


@pytest.mark.parametrize("name", REPLAY_AGENTS)
def test_repeated_updates_learn_the_rewards_of_one_batch(name):
    """Rewards on the atoms of C51 without a future: the smallest loss is 0 for every head."""
    update = make(REPLAY_AGENTS[name], AdamConfig(lr=3e-3))
    batch = batches(1)[0]
    batch.discount[:] = 0
    batch.reward[:] = np.random.default_rng(1).choice([-2, 0, 2], 16)
    losses = [float(update(batch).metrics["loss"]) for _ in range(150)]
    assert update.updates == 150
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])


def test_trap_11_importance_weights_scale_each_samples_huber_gradient():
    """One plain gradient step moves the weights by the weighted sum over the global batch."""
    agent = ReplayAgent()
    batch = dataclasses.replace(batches(1)[0], global_size=64)
    batch.reward[:8] *= 100  # far in the linear part of the loss
    update = make(agent, SgdConfig(lr=1.0, max_grad_norm=None))
    reference = build_network(SMALL, agent, VECTOR, 3)
    loss = compute_loss(agent, reference, reference, to_tensors(batch, CPU))
    total = sum(w * each for w, each in zip(batch.weight.tolist(), loss.per_sample, strict=True)) / 64
    total.backward()
    result = update(batch)
    torch.testing.assert_close(result.metrics["loss"], total.detach())
    np.testing.assert_array_equal(result.priority, loss.priority.numpy())
    for parameter, expected in zip(update.online.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), expected.detach() - expected.grad)


def test_parts_of_a_global_batch_sum_to_the_whole():
    """Two ranks whose hook sums their gradients step exactly as one with the whole batch."""
    whole = batches(1)[0]
    optim = SgdConfig(lr=0.5, max_grad_norm=None)
    gradients = []
    for part in (slice(0, 6), slice(6, 16)):
        rank = make(ReplayAgent(), optim, hook=lambda flat: gradients.append(flat.clone()))
        cut = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
        for name, value in cut.items():
            if isinstance(value, dict):
                cut[name] = {k: v[part] for k, v in value.items()}
            elif isinstance(value, np.ndarray):
                cut[name] = value[part]
        rank(type(whole)(**{**cut, "global_size": 16}))
    make(ReplayAgent(), optim, hook=lambda flat: gradients.append(flat.clone()))(whole)
    torch.testing.assert_close(gradients[0] + gradients[1], gradients[2])


def test_trap_10_noise_is_drawn_anew_and_apart_for_online_and_target():
    update = make(REPLAY_AGENTS["rainbow"])
    seen = set()
    for batch in batches(3):
        update(batch)
        for network in (update.online, update.target):
            seen.add(tuple(network.head.streams.value[-1].noise_in.tolist()))
    assert len(seen) == 6
    assert update.target.head.streams.value[-1].training


def test_a_batch_on_the_device_and_a_message_teach_the_same():
    by_message, by_tensors = make(ReplayAgent(double=True)), make(ReplayAgent(double=True))
    for batch in batches(3):
        result, learned = by_message(batch), by_tensors.learn(to_tensors(batch, CPU))
        assert learned.made
        np.testing.assert_array_equal(result.priority, learned.priority.numpy())
        assert result.metrics == learned.metrics
    np.testing.assert_array_equal(by_message.flat.to_numpy(), by_tensors.flat.to_numpy())


def test_the_gradient_can_be_replaced():
    """One that turns the eager gradient round climbs where the eager one descends."""

    class Uphill(EagerGradient):
        def replay(self, batch):
            found = super().replay(batch)
            self._flat.gradients.neg_()
            return found

    batch = batches(1)[0]
    batch.discount[:] = 0
    losses = {}
    for gradient in (EagerGradient, Uphill):
        update = make(ReplayAgent(loss="mse"), SgdConfig(lr=0.01), gradient=gradient)
        losses[gradient] = [float(update(batch).metrics["loss"]) for _ in range(10)]
    assert losses[EagerGradient][-1] < losses[EagerGradient][0] == losses[Uphill][0] < losses[Uphill][-1]


def test_hard_target_is_copied_after_every_period_of_gradient_steps():
    update = make(ReplayAgent(target=HardTargetConfig(period=3)))
    start = update.flat.to_numpy()
    equal = []
    for batch in batches(7):
        update(batch)
        same = torch.equal(
            update.target.head.streams.advantage[0].weight, update.online.head.streams.advantage[0].weight
        )
        equal.append(same)
    assert equal == [False, False, True, False, False, True, False]
    assert not np.array_equal(start, update.flat.to_numpy())


def test_soft_target_moves_by_tau_after_each_gradient_step():
    update = make(ReplayAgent(target=SoftTargetConfig(tau=0.25)))
    target = [p.detach().clone() for p in update.target.parameters()]
    for batch in batches(3):
        update(batch)
        online = list(update.online.parameters())
        target = [0.75 * t + 0.25 * o.detach() for t, o in zip(target, online, strict=True)]
        for found, expected in zip(update.target.parameters(), target, strict=True):
            torch.testing.assert_close(found.detach(), expected)


@pytest.mark.parametrize(
    ("agent", "bad"),
    [
        (ReplayAgent(target=SoftTargetConfig(tau=0.5)), np.inf),
        (ReplayAgent(loss="mse"), np.inf),
        *((agent, np.nan) for agent in REPLAY_AGENTS.values()),
    ],
)
def test_a_non_finite_update_is_skipped_and_changes_nothing(agent, bad):
    """The Huber loss of an infinite reward has a finite gradient, and must be skipped all the same."""
    update = make(agent, network=SMALL.replace(input=InputConfig(normalize=True)))
    good, spoilt = batches(2)
    update(good)
    before, moments = update.state_dict(), roundtrip(update.state_dict()["step"]["optim"])
    spoilt.reward[3] = bad
    result = update(spoilt)
    assert (result.updates, result.skipped, result.priority) == (0, 1, None)
    after = update.state_dict()
    assert update.updates == 1
    np.testing.assert_array_equal(after["target"], before["target"])
    np.testing.assert_array_equal(after["step"]["weights"], before["step"]["weights"])
    for name, value in after["step"]["optim"]["moments"].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(moments["moments"][name]))
    assert update(good).updates == 1


@pytest.mark.parametrize("name", REPLAY_AGENTS)
def test_a_batch_for_several_updates_teaches_what_they_teach_one_by_one(name):
    """The second of the three is not finite: it is left out, and only its items get no priority."""
    single = batches(3)
    single[1].reward[2] = np.nan
    joined = joined_batch(single)
    apart, together = make(REPLAY_AGENTS[name]), make(REPLAY_AGENTS[name])
    results = [apart(batch) for batch in single]
    result = together(joined)
    assert (result.updates, result.skipped) == (2, 1)
    np.testing.assert_array_equal(together.flat.to_numpy(), apart.flat.to_numpy())
    first, second, third = np.split(result.priority, 3)
    np.testing.assert_array_equal(first, results[0].priority)
    assert np.isnan(second).all()
    np.testing.assert_array_equal(third, results[2].priority)


def test_a_batch_for_several_updates_of_which_none_is_finite_is_skipped():
    single = batches(2)
    for batch in single:
        batch.reward[:] = np.nan
    result = make(ReplayAgent())(joined_batch(single))
    assert (result.updates, result.skipped, result.priority) == (0, 2, None)


def joined_batch(single):
    """The items of several batches as one message, for an update each."""

    def join(values):
        if isinstance(values[0], dict):
            return {name: join([value[name] for value in values]) for name in values[0]}
        return np.concatenate(values) if isinstance(values[0], np.ndarray) else values[0]

    fields = {f.name: join([getattr(batch, f.name) for batch in single]) for f in dataclasses.fields(single[0])}
    fields["global_size"] = sum(batch.global_size or len(batch.action) for batch in single)
    return dataclasses.replace(single[0], **{**fields, "updates": len(single)})


def test_the_learner_feeds_the_running_statistics():
    update = make(ReplayAgent(), network=SMALL.replace(input=InputConfig(normalize=True)))
    data = batches(3)
    for batch in data:
        update(batch)
    seen = np.concatenate([batch.observation[PLAIN] for batch in data])
    stage = update.online.torso.inputs.stages[0]
    np.testing.assert_allclose(stage.mean.numpy(), seen.mean(0), atol=1e-5)
    np.testing.assert_allclose(stage.variance.numpy(), seen.var(0), rtol=1e-4)


RESUMED = [
    *((agent, SMALL) for agent in REPLAY_AGENTS.values()),
    (ReplayAgent(), MlpConfig(hidden=(8, 8, 8), dropout=0.3, spectral_norm=True, input=InputConfig(normalize=True))),
    (RolloutAgent(epochs=2, minibatches=3), MlpConfig(hidden=(8, 8), layer_norm=True, dropout=0.1)),
]


@pytest.mark.parametrize(("agent", "network"), RESUMED)
def test_a_saved_update_goes_on_bit_by_bit(agent, network):
    rng = np.random.default_rng(0)
    kind = make_rollout if isinstance(agent, RolloutAgent) else make_batch
    messages = [kind(VECTOR, rng) for _ in range(6)]
    whole, first, second = make(agent, network=network), make(agent, network=network), make(agent, network=network)
    for message in messages:
        whole(message)
    for message in messages[:3]:
        first(message)
    second(messages[5])  # so that there is something to overwrite
    second.load_state_dict(roundtrip(first.state_dict()))
    for message in messages[3:]:
        second(message)
    np.testing.assert_array_equal(whole.flat.to_numpy(), second.flat.to_numpy())
    assert whole.updates == second.updates
    if whole.target is not None:
        np.testing.assert_array_equal(whole.state_dict()["target"], second.state_dict()["target"])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(1, 4), st.floats(0, 1), st.booleans())
def test_trap_1_rollout_targets_match_the_naive_recursion(seed, ticks, envs, q_lambda, masked):
    """Truncation bootstraps from the final observation, termination does not, resets are no samples."""
    rollout = make_rollout(VECTOR, np.random.default_rng(seed), ticks, envs, masked)
    agent = RolloutAgent(gamma=0.9, q_lambda=q_lambda)
    network = build_network(SMALL, agent, VECTOR, 0)

    def best(leaf, mask):
        with torch.no_grad():
            q = network({PLAIN: torch.from_numpy(leaf[None])}).double().numpy()[0]
        return q.max() if mask is None else q[mask].max()

    finals = {(t, e): i for i, (t, e) in enumerate(rollout.final_at.tolist())}

    def target(t, e):
        reward = float(rollout.reward[t, e])
        if rollout.terminated[t, e]:
            return reward
        if rollout.truncated[t, e]:
            i = finals[t, e]
            mask = rollout.final_mask[i] if masked else None
            return reward + 0.9 * best(rollout.final_observation[PLAIN][i], mask)
        value = best(rollout.observation[PLAIN][t + 1, e], rollout.mask[t + 1, e] if masked else None)
        if t + 1 == ticks or not rollout.valid[t + 1, e]:
            return reward + 0.9 * value
        return reward + 0.9 * (q_lambda * target(t + 1, e) + (1 - q_lambda) * value)

    data = rollout_tensors(agent, network, rollout, CPU)
    expected = [target(t, e) for t, e in np.argwhere(rollout.valid).tolist()]
    np.testing.assert_allclose(data.goal.numpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(data.action.numpy(), rollout.action[rollout.valid])
    np.testing.assert_array_equal(data.observation[PLAIN].numpy(), rollout.observation[PLAIN][:-1][rollout.valid])


def test_a_rollout_is_gone_through_in_epochs_of_disjoint_minibatches():
    agent = RolloutAgent(epochs=3, minibatches=4)
    seen: list[torch.Tensor] = []
    update = make(agent)
    update.online.register_forward_pre_hook(
        lambda module, args: seen.append(args[0][PLAIN]) if module.training else None
    )
    rollout = make_rollout(VECTOR, np.random.default_rng(4), 8, 4)
    result = update(rollout)
    assert (result.updates, result.skipped, update.updates, result.priority) == (12, 0, 12, None)
    samples = rollout.observation[PLAIN][:-1][rollout.valid]
    orders = []
    for epoch in range(3):
        parts = seen[4 * epoch : 4 * epoch + 4]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        together = torch.cat(parts).numpy()
        orders.append(together)
        np.testing.assert_array_equal(np.sort(together, 0), np.sort(samples, 0))
    assert not np.array_equal(orders[0], orders[1])


def test_a_rollout_with_fewer_valid_ticks_than_minibatches_stays_finite():
    rollout = make_rollout(VECTOR, np.random.default_rng(0), 1, 2)
    rollout.valid[:] = False
    update = make(RolloutAgent(epochs=1, minibatches=4))
    before = update.flat.to_numpy()
    assert update(rollout).skipped == 0
    np.testing.assert_array_equal(update.flat.to_numpy(), before)


def test_ticks_of_weight_0_teach_nothing():
    """Whole rollouts of one shape, as a recorded loop needs them: what the ignored ticks hold must not matter."""
    agent = RolloutAgent(epochs=2, minibatches=3)
    data = rollout_tensors(agent, build_network(SMALL, agent, VECTOR, 3), _whole_rollout(), CPU)
    weight = torch.arange(len(data.action)).remainder(4).ne(0).float()
    spoilt = data.observation[PLAIN].clone()
    spoilt[weight == 0] = 1e3
    first, second, unweighted = make(agent), make(agent), make(agent)
    result = first.learn(dataclasses.replace(data, weight=weight))
    goal = torch.where(weight == 0, 7.0, data.goal)
    again = second.learn(RolloutTensors({PLAIN: spoilt}, data.action, goal, weight))
    assert (result.updates, again.updates) == (6, 6)
    np.testing.assert_allclose(first.flat.to_numpy(), second.flat.to_numpy(), atol=1e-6)
    unweighted.learn(data)
    assert not np.allclose(first.flat.to_numpy(), unweighted.flat.to_numpy(), atol=1e-4)


def test_a_weight_of_1_everywhere_is_no_weight():
    agent = RolloutAgent(epochs=2, minibatches=3)
    data = rollout_tensors(agent, build_network(SMALL, agent, VECTOR, 3), _whole_rollout(), CPU)
    plain, weighted = make(agent), make(agent)
    expected = plain.learn(data).metrics
    found = weighted.learn(dataclasses.replace(data, weight=torch.ones(len(data.action)))).metrics
    torch.testing.assert_close(found, expected)
    np.testing.assert_allclose(weighted.flat.to_numpy(), plain.flat.to_numpy(), atol=1e-6)


def _whole_rollout():
    """Return a rollout without a reset."""
    rollout = make_rollout(VECTOR, np.random.default_rng(4), 8, 4, ends=0.0)
    rollout.valid[:] = True
    return rollout


def test_a_nan_in_a_rollout_is_skipped():
    rollout = make_rollout(VECTOR, np.random.default_rng(0), ends=0.0)
    rollout.reward[:] = np.nan
    update = make(RolloutAgent(epochs=2, minibatches=2))
    before = update.flat.to_numpy()
    result = update(rollout)
    assert (result.updates, result.skipped) == (0, 4)
    np.testing.assert_array_equal(update.flat.to_numpy(), before)


def _transition(state, action, reward, following, terminated=False, truncated=False, **masks):
    """One tick of one environment."""
    ended = terminated or truncated
    return Rollout(
        version=Version(),
        observation={PLAIN: np.array([[state], [0 if ended else following]])},
        action=np.array([[action]]),
        reward=np.array([[reward]], np.float32),
        terminated=np.array([[terminated]]),
        truncated=np.array([[truncated]]),
        valid=np.array([[True]]),
        final_observation={PLAIN: np.array([following] if ended else [], np.int64)},
        final_at=np.array([[0, 0]] if ended else np.zeros((0, 2)), np.int64),
        **masks,
    )


def test_tabular_update_is_watkins_rule():
    update = make(TabularAgent(gamma=0.9, alpha=0.1), network=TabularConfig(), spec=STATES)
    table = update.online.head.table
    with torch.no_grad():
        table[5] = torch.tensor([4.0, 6.0])
    update(_transition(1, 0, 2.0, 5))
    assert table[1, 0].item() == pytest.approx(0.1 * (2 + 0.9 * 6))
    update(_transition(2, 0, 2.0, 5, terminated=True))
    assert table[2, 0].item() == pytest.approx(0.2)
    update(_transition(3, 0, 2.0, 5, truncated=True))
    assert table[3, 0].item() == pytest.approx(0.1 * (2 + 0.9 * 6))
    masks = {"mask": np.array([[[True, True]], [[True, False]]])}
    update(_transition(4, 1, 2.0, 5, **masks))
    assert table[4, 1].item() == pytest.approx(0.1 * (2 + 0.9 * 4))
    assert update.updates == 4


def test_tabular_updates_of_the_same_entry_follow_one_another():
    update = make(TabularAgent(gamma=0.0, alpha=0.5), network=TabularConfig(), spec=STATES)
    one = _transition(1, 0, 8.0, 2)
    both = dataclasses.replace(
        one,
        observation={PLAIN: np.repeat(one.observation[PLAIN], 3, 1)},
        **{name: np.repeat(getattr(one, name), 3, 1) for name in ("action", "reward", "terminated", "truncated")},
        valid=np.array([[True, False, True]]),
    )
    result = update(both)
    assert result.updates == 2
    assert update.online.head.table[1, 0].item() == 6.0  # 0 -> 4 -> 6


def test_tabular_learning_reaches_the_optimal_values_of_a_corridor():
    """States 0..6; action 1 goes right, 0 left; -1 a step, +10 at the right end, gamma 0.9."""
    update = make(TabularAgent(gamma=0.9, alpha=0.1), network=TabularConfig(), spec=STATES)
    rng = np.random.default_rng(0)
    state = 0
    for _ in range(6000):
        action = int(rng.integers(2))
        following = min(max(state + 2 * action - 1, 0), 6)
        end = following == 6
        update(_transition(state, action, 9.0 if end else -1.0, following, terminated=end))
        state = 0 if end else following
    best = np.zeros((7, 2))
    for _ in range(100):
        for s in range(6):
            for a in range(2):
                n = min(max(s + 2 * a - 1, 0), 6)
                best[s, a] = 9.0 if n == 6 else -1 + 0.9 * best[n].max()
    np.testing.assert_allclose(update.online.head.table.detach().numpy()[:6], best[:6], atol=1e-3)
    copy = make(TabularAgent(), network=TabularConfig(), spec=STATES)
    copy.load_state_dict(roundtrip(update.state_dict()))
    assert torch.equal(copy.online.head.table, update.online.head.table)
    assert copy.updates == 6000
