"""Targets and pure losses against plain NumPy, written from the papers' formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.algo.losses import quantile_huber, value_error
from qfleet.algo.targets import allow, bellman, greedy, lambda_returns, pick, project, soft_log_policy, soft_value

SEEDS = st.integers(0, 2**32 - 1)


def _project_one(probability, returns, support):
    """C51's projection for one item, as in its Algorithm 1."""
    result = np.zeros(len(support))
    spacing = (support[-1] - support[0]) / (len(support) - 1)
    for p, value in zip(probability, returns, strict=True):
        place = (min(max(value, support[0]), support[-1]) - support[0]) / spacing
        place = min(place, len(support) - 1.0)  # the quotient may round to a hair above the last atom
        low, high = int(np.floor(place)), int(np.ceil(place))
        if low == high:
            result[low] += p
        else:
            result[low] += p * (high - place)
            result[high] += p * (place - low)
    return result


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.integers(2, 12), st.integers(1, 5))
def test_projection_matches_algorithm_and_conserves_mass(seed, atoms, size):
    rng = np.random.default_rng(seed)
    low, high = sorted(rng.uniform(-20, 20, 2))
    support = np.linspace(low, high + 0.1, atoms)
    probability = rng.dirichlet(np.ones(atoms), size)
    returns = rng.uniform(-1, 1, (size, 1)) * 30 + rng.choice([0, 0.5, 1.0], (size, 1)) * support
    found = project(torch.tensor(probability), torch.tensor(returns), torch.tensor(support)).numpy()
    expected = np.array([_project_one(p, r, support) for p, r in zip(probability, returns, strict=True)])
    np.testing.assert_allclose(found, expected, atol=1e-9)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-9)


def test_projection_keeps_the_mean_inside_the_support():
    support = torch.linspace(-10, 10, 51, dtype=torch.float64)
    probability = torch.softmax(torch.randn(8, 51, generator=torch.Generator().manual_seed(0), dtype=torch.float64), -1)
    returns = 0.3 + 0.9 * support.expand(8, -1)
    mean = project(probability, returns, support) @ support
    torch.testing.assert_close(mean, (probability * returns).sum(1))


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.integers(1, 6), st.integers(1, 6), st.floats(0.1, 3))
def test_quantile_huber_matches_double_loop(seed, predictions, goals, threshold):
    rng = np.random.default_rng(seed)
    theta, goal, taus = rng.normal(0, 2, (4, predictions)), rng.normal(0, 2, (4, goals)), rng.random((4, predictions))
    expected = np.zeros(4)
    for b in range(4):
        for i in range(predictions):
            for j in range(goals):
                u = goal[b, j] - theta[b, i]
                huber = 0.5 * u * u if abs(u) <= threshold else threshold * (abs(u) - 0.5 * threshold)
                expected[b] += abs(taus[b, i] - (u < 0)) * huber / threshold / goals
    found = quantile_huber(torch.tensor(theta), torch.tensor(taus), torch.tensor(goal), threshold)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


def test_quantile_regression_finds_the_quantiles_of_a_sample():
    sample = torch.tensor(np.random.default_rng(0).exponential(1, 500)).unsqueeze(0)
    taus = torch.tensor([[0.1, 0.5, 0.9]], dtype=torch.float64)
    theta = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=0.02)
    for _ in range(600):
        optimizer.zero_grad()
        quantile_huber(theta, taus, sample, 0.01).sum().backward()
        optimizer.step()
    torch.testing.assert_close(theta.detach()[0], torch.quantile(sample[0], taus[0]), atol=0.05, rtol=0)


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_value_error_and_its_gradient(kind):
    error = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    loss = value_error(error, torch.zeros_like(error), kind, 2.0)
    loss.sum().backward()
    size = error.detach().abs()
    quadratic = (size <= 2) | (kind == "mse")
    torch.testing.assert_close(loss.detach(), torch.where(quadratic, 0.5 * size**2, 2 * (size - 1)))
    torch.testing.assert_close(error.grad, torch.where(quadratic, error.detach(), 2 * error.detach().sign()))


def test_losses_pass_gradient_checks_in_double_precision():
    generator = torch.Generator().manual_seed(3)
    theta = torch.randn(3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    goal = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    taus = torch.rand(3, 4, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda t: quantile_huber(t, taus, goal, 1.0), theta)
    assert torch.autograd.gradcheck(lambda t: value_error(t, goal[:, :4], "huber", 1.0), theta)


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.integers(1, 6), st.sampled_from([0, 4]))
def test_trap_18_forbidden_actions_are_never_the_greedy_ones(seed, actions, entries):
    rng = np.random.default_rng(seed)
    q, mask = rng.normal(size=(8, actions)), rng.random((8, actions)) < 0.5
    output = rng.normal(size=(8, actions, entries)) if entries else q
    found = greedy(torch.tensor(output), torch.tensor(q), torch.tensor(mask)).numpy()
    for row in range(8):
        allowed = np.flatnonzero(mask[row]) if mask[row].any() else np.arange(actions)
        np.testing.assert_array_equal(found[row], output[row, allowed[np.argmax(q[row, allowed])]])


def test_rows_without_any_allowed_action_stay_finite():
    q = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mask = torch.tensor([[False, False], [True, False]])
    assert allow(q, mask).tolist() == [[1.0, 2.0], [3.0, -torch.inf]]
    value = greedy(q, q, mask)
    assert bellman(torch.ones(2), torch.tensor([0.0, 1.0]), value).tolist() == [1.0, 4.0]


def test_pick_takes_the_actions_entries():
    output = torch.arange(24.0).view(2, 3, 4)
    action = torch.tensor([2, 0])
    assert torch.equal(pick(output, action), torch.stack([output[0, 2], output[1, 0]]))
    assert pick(output[:, :, 0], action).tolist() == [8.0, 12.0]


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.integers(2, 5), st.floats(0.03, 2))
def test_soft_value_matches_the_formula_among_allowed_actions(seed, actions, temperature):
    rng = np.random.default_rng(seed)
    q, output = rng.normal(size=(6, actions)), rng.normal(size=(6, actions, 3))
    mask = rng.random((6, actions)) < 0.5
    mask[:, 0] = True
    log_policy = soft_log_policy(torch.tensor(q), torch.tensor(mask), temperature)
    found = soft_value(torch.tensor(output), log_policy, temperature).numpy()
    plain = soft_value(torch.tensor(q), log_policy, temperature).numpy()
    for row in range(6):
        own = q[row, mask[row]]
        scaled = (own - own.max()) / temperature
        log_pi = scaled - np.log(np.exp(scaled).sum())
        pi = np.exp(log_pi)
        expected = (pi[:, None] * (output[row, mask[row]] - temperature * log_pi[:, None])).sum(0)
        np.testing.assert_allclose(found[row], expected, rtol=1e-7, atol=1e-9)
        # For the values themselves this is the log-sum-exp.
        expected_plain = own.max() + temperature * np.log(np.exp(scaled).sum())
        np.testing.assert_allclose(plain[row], expected_plain, rtol=1e-7, atol=1e-9)


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.integers(1, 6), st.floats(0, 1))
def test_lambda_returns_mix_all_n_step_returns(seed, ticks, q_lambda):
    """Within one unbroken stretch the target is the weighted mean of its n-step returns."""
    rng = np.random.default_rng(seed)
    reward, value = rng.normal(size=ticks), rng.normal(size=ticks)
    gamma = 0.9
    continues = np.arange(ticks) < ticks - 1
    arguments = [torch.tensor(x).unsqueeze(1) for x in (reward, np.full(ticks, gamma), value, continues)]
    found = lambda_returns(*arguments, q_lambda)[:, 0].numpy()
    for t in range(ticks):
        left = ticks - t
        n_steps = [
            sum(gamma**k * reward[t + k] for k in range(n)) + gamma**n * value[t + n - 1] for n in range(1, left + 1)
        ]
        weights = [(1 - q_lambda) * q_lambda ** (n - 1) for n in range(1, left)] + [q_lambda ** (left - 1)]
        np.testing.assert_allclose(found[t], np.dot(weights, n_steps), rtol=1e-9, atol=1e-9)
