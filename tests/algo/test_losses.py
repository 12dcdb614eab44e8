"""The whole losses of replay agents against parts computed by hand from the networks' outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algo_cases import VECTOR, make_batch

from qfleet.algo.agent import MunchausenConfig, ReplayAgent
from qfleet.algo.batch import to_tensors
from qfleet.algo.heads import CategoricalConfig, ImplicitQuantileConfig, QuantileConfig
from qfleet.algo.losses import compute_loss
from qfleet.algo.networks import build_network
from qfleet.algo.torsos import MlpConfig
from qfleet.core.spec import PLAIN

CPU = torch.device("cpu")
HEADS = {
    "quantile": QuantileConfig(quantiles=5),
    "implicit_quantile": ImplicitQuantileConfig(taus=5, target_taus=7, acting_taus=6, cosines=8),
    "categorical": CategoricalConfig(atoms=11, v_min=-3, v_max=3),
}


def _case(agent, masked=False, seed=0):
    rng = np.random.default_rng(seed)
    online = build_network(MlpConfig(hidden=(16, 16)), agent, VECTOR, 1)
    target = build_network(MlpConfig(hidden=(16, 16)), agent, VECTOR, 2)
    return online, target, make_batch(VECTOR, rng, masked=masked)


def _numpy(network, leaf, taus=None):
    with torch.no_grad():
        return network({PLAIN: torch.from_numpy(leaf)}, taus).double().numpy()


def _rows(values):
    return np.arange(len(values))


def _huber(error, threshold=1.0):
    return np.where(abs(error) <= threshold, 0.5 * error**2, threshold * (abs(error) - 0.5 * threshold))


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("noisy", [False, True])
def test_double_chooses_without_dropout_but_with_noise(noisy):
    agent, config = ReplayAgent(double=True, noisy=noisy), MlpConfig(hidden=(16, 16), dropout=0.7)
    online, target = (build_network(config, agent, VECTOR, seed) for seed in (1, 2))
    for network in (online, target.explore()):
        network.resample_noise(torch.Generator().manual_seed(5))
    batch = make_batch(VECTOR, np.random.default_rng(0), size=64)
    online.generator.manual_seed(0)
    loss = compute_loss(agent, online.train(), target, to_tensors(batch, CPU))
    assert all(module.training for module in online.modules())
    online.generator.manual_seed(0)
    value = _numpy(online, batch.observation[PLAIN])[_rows(batch.action), batch.action]
    chooser = _numpy(online.explore(), batch.next_observation[PLAIN])
    goal = (
        batch.reward + batch.discount * _numpy(target, batch.next_observation[PLAIN])[_rows(chooser), chooser.argmax(1)]
    )
    np.testing.assert_allclose(loss.priority.numpy(), abs(goal - value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_trap_11_double_chooses_online_and_values_by_target(double, masked):
    online, target, batch = _case(agent := ReplayAgent(double=double), masked)
    chooser = _numpy(online if double else target, batch.next_observation[PLAIN])
    if masked:
        chooser = np.where(batch.next_mask, chooser, -np.inf)
    value = _numpy(target, batch.next_observation[PLAIN])[_rows(chooser), chooser.argmax(1)]
    goal = batch.reward + batch.discount * value
    error = goal - _numpy(online, batch.observation[PLAIN])[_rows(goal), batch.action]
    loss = compute_loss(agent, online, target, to_tensors(batch, CPU))
    np.testing.assert_allclose(loss.per_sample.detach().numpy(), _huber(error), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss.priority.numpy(), abs(error), rtol=1e-4, atol=1e-6)


def test_trap_4_the_bootstrap_uses_the_batch_discount_and_not_the_agents_gamma():
    online, target, batch = _case(ReplayAgent(gamma=0.5))
    losses = [
        compute_loss(ReplayAgent(gamma=g, n_step=n), online, target, to_tensors(batch, CPU)).per_sample
        for g, n in ((0.5, 1), (0.9, 3))
    ]
    assert torch.equal(*losses)


def test_trap_1_only_a_zero_discount_stops_the_bootstrap():
    online, target, batch = _case(agent := ReplayAgent(loss="mse"))
    ended = batch.discount == 0
    assert ended.any()
    assert not ended.all()
    found = compute_loss(agent, online, target, to_tensors(batch, CPU)).per_sample.detach().numpy()
    q = _numpy(online, batch.observation[PLAIN])[_rows(ended), batch.action]
    following = 0.99**3 * _numpy(target, batch.next_observation[PLAIN]).max(1)
    goal = np.where(ended, batch.reward, batch.reward + following)
    np.testing.assert_allclose(found, 0.5 * (goal - q) ** 2, rtol=1e-3, atol=1e-6)


def test_no_gradient_reaches_the_target_or_the_next_value():
    online, target, batch = _case(agent := ReplayAgent(double=True))
    compute_loss(agent, online, target, to_tensors(batch, CPU)).per_sample.sum().backward()
    assert all(p.grad is None for p in target.parameters())
    gradient = torch.cat([p.grad.flatten() for p in online.parameters()])
    for p in online.parameters():
        p.grad = None
    tensors = to_tensors(batch, CPU)
    with torch.no_grad():
        next_action = online(tensors.next_observation).argmax(1)
        goal = tensors.reward + tensors.discount * target(tensors.next_observation)[range(16), next_action]
    value = online(tensors.observation)[range(16), tensors.action]
    torch.nn.functional.huber_loss(value, goal, reduction="sum").backward()
    torch.testing.assert_close(gradient, torch.cat([p.grad.flatten() for p in online.parameters()]))


def test_rainbows_loss_equals_its_parts_by_hand():
    """Double, dueling, noisy, C51, n-step discounts, masks: all at once."""
    agent = ReplayAgent(double=True, dueling=True, noisy=True, n_step=3, head=HEADS["categorical"])
    online, target, batch = _case(agent, masked=True)
    generator = torch.Generator().manual_seed(5)
    online.resample_noise(generator)
    target.resample_noise(generator)
    support = np.linspace(-3, 3, 11)
    chooser = _softmax(_numpy(online, batch.next_observation[PLAIN])) @ support
    action = np.where(batch.next_mask, chooser, -np.inf).argmax(1)
    probability = _softmax(_numpy(target, batch.next_observation[PLAIN]))[_rows(action), action]
    goal = np.zeros_like(probability)
    for b in range(len(goal)):
        for k in range(11):
            place = (np.clip(batch.reward[b] + batch.discount[b] * support[k], -3, 3) + 3) / 0.6
            low = min(int(np.floor(place)), 9)
            goal[b, low] += probability[b, k] * (low + 1 - place)
            goal[b, low + 1] += probability[b, k] * (place - low)
    logits = _numpy(online, batch.observation[PLAIN])[_rows(action), batch.action]
    expected = -(goal * np.log(_softmax(logits))).sum(1)
    loss = compute_loss(agent, online, target, to_tensors(batch, CPU))
    np.testing.assert_allclose(loss.per_sample.detach().numpy(), expected, rtol=1e-4)
    np.testing.assert_array_equal(loss.priority.numpy(), loss.per_sample.detach().numpy())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["quantile", "implicit_quantile"])
@pytest.mark.parametrize("variant", ["plain", "double", "munchausen"])
def test_quantile_losses_equal_their_parts_by_hand(kind, variant, masked):
    soft = MunchausenConfig(alpha=0.8, temperature=0.2, clip=-0.3) if variant == "munchausen" else None
    agent = ReplayAgent(head=HEADS[kind], double=variant == "double", munchausen=soft, huber_threshold=0.7)
    online, target, batch = _case(agent, masked)
    online.set_generator(torch.Generator().manual_seed(9))
    loss = compute_loss(agent, online, target, to_tensors(batch, CPU))
    redraw = torch.Generator().manual_seed(9)
    implicit = kind == "implicit_quantile"
    target_taus = torch.rand(16, 7, generator=redraw) if implicit else None
    taus = torch.rand(16, 5, generator=redraw) if implicit else None
    observation, following = batch.observation[PLAIN], batch.next_observation[PLAIN]
    output = _numpy(target, following, target_taus)
    chooser = _numpy(online if variant == "double" else target, following).mean(-1)
    chooser = np.where(batch.next_mask, chooser, -np.inf) if masked else chooser
    if soft is None:
        goal = batch.reward[:, None] + batch.discount[:, None] * output[_rows(output), chooser.argmax(1)]
    else:
        pi = _softmax(chooser / 0.2)
        entropy = np.where(pi > 0, 0.2 * np.log(np.maximum(pi, 1e-300)), 0)
        value = (pi[..., None] * (output - entropy[..., None])).sum(1)
        now = _numpy(target, observation).mean(-1)
        now = np.where(batch.mask, now, -np.inf) if masked else now
        log_pi = np.log(_softmax(now / 0.2)[_rows(now), batch.action])
        reward = batch.reward + 0.8 * np.clip(0.2 * log_pi, -0.3, 0)
        goal = reward[:, None] + batch.discount[:, None] * value
    prediction = _numpy(online, observation, taus)[_rows(goal), batch.action]
    fractions = taus.double().numpy() if implicit else np.broadcast_to((np.arange(5) + 0.5) / 5, (16, 5))
    error = goal[:, None, :] - prediction[:, :, None]
    asymmetry = abs(fractions[:, :, None] - (error < 0))
    expected = (asymmetry * _huber(error, 0.7) / 0.7).mean(2).sum(1)
    np.testing.assert_allclose(loss.per_sample.detach().numpy(), expected, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_munchausen_dqn_equals_its_parts_by_hand(masked):
    agent = ReplayAgent(munchausen=MunchausenConfig())
    online, target, batch = _case(agent, masked)
    following, now = _numpy(target, batch.next_observation[PLAIN]), _numpy(target, batch.observation[PLAIN])
    goal = np.zeros(16)
    for b in range(16):
        allowed = batch.next_mask[b] if masked else np.ones(3, bool)
        best = following[b, allowed].max()
        soft = best + 0.03 * np.log(np.exp((following[b, allowed] - best) / 0.03).sum())
        allowed = batch.mask[b] if masked else np.ones(3, bool)
        best = now[b, allowed].max()
        total = best + 0.03 * np.log(np.exp((now[b, allowed] - best) / 0.03).sum())
        bonus = np.clip(now[b, batch.action[b]] - total, -1, 0)
        goal[b] = batch.reward[b] + 0.9 * bonus + batch.discount[b] * soft
    error = goal - _numpy(online, batch.observation[PLAIN])[_rows(goal), batch.action]
    loss = compute_loss(agent, online, target, to_tensors(batch, CPU))
    np.testing.assert_allclose(loss.per_sample.detach().numpy(), _huber(error), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["scalar", "quantile", "implicit_quantile", "categorical", "munchausen"])
def test_trap_18_forbidden_next_actions_have_no_influence(kind):
    """Raising the value of an action that is forbidden everywhere next changes no target."""
    soft = MunchausenConfig() if kind == "munchausen" else None
    agent = ReplayAgent(munchausen=soft, **({"head": HEADS[kind]} if kind in HEADS else {}))
    online, target, batch = _case(agent, masked=True)
    masks = np.tile(np.array([True, True, False]), (16, 1))
    batch = make_batch(VECTOR, np.random.default_rng(1), mask=masks, next_mask=masks, action=np.zeros(16, np.int64))
    results = []
    for _ in range(2):
        online.set_generator(torch.Generator().manual_seed(3))
        results.append(compute_loss(agent, online, target, to_tensors(batch, CPU)).per_sample)
        last = target.head.streams.advantage[-1]
        with torch.no_grad():  # the outputs of one action are consecutive
            entries = len(last.bias) // 3
            last.bias[2 * entries :] += torch.linspace(1, 100, entries)
    assert torch.equal(*results)


def test_a_row_of_all_forbidden_actions_after_the_end_is_no_nan():
    batch = make_batch(
        VECTOR, np.random.default_rng(1), next_mask=np.zeros((16, 3), bool), discount=np.zeros(16, np.float32)
    )
    for soft in (None, MunchausenConfig()):
        online, target, _ = _case(agent := ReplayAgent(munchausen=soft))
        assert compute_loss(agent, online, target, to_tensors(batch, CPU)).per_sample.isfinite().all()
