"""Epsilon belongs to the run, the coin to each environment, and a forbidden action is never taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import TypeAdapter, ValidationError

from qfleet.algo.exploration import EpsilonGreedyConfig, ExplorationConfig, LadderConfig, NoneConfig, choose, epsilons


def fixed(epsilon: float, envs: int) -> np.ndarray:
    return np.full(envs, epsilon, np.float32)


def test_trap_8_each_environment_has_its_own_coin() -> None:
    rng, envs, calls = np.random.default_rng(0), 16, 4000
    q = np.tile([0.0, 1.0], (envs, 1))
    random = np.stack([choose(q, fixed(0.3, envs), None, rng) == 0 for _ in range(calls)])  # half of the random ones
    # Were there one coin for all, the number of random actions in a call would vary far more than a binomial one.
    assert random.mean() == pytest.approx(0.15, abs=0.006)
    assert random.sum(axis=1).var() == pytest.approx(envs * 0.15 * 0.85, rel=0.1)
    correlation = np.corrcoef(random.T)
    assert np.abs(correlation - np.eye(envs)).max() < 0.08


def test_trap_8_each_environment_has_its_own_epsilon() -> None:
    rng, epsilon = np.random.default_rng(1), np.array([0.0, 0.1, 0.5, 1.0], np.float32)
    q = np.tile([1.0, 0.0, 0.0], (4, 1))
    other = np.mean([choose(q, epsilon, None, rng) != 0 for _ in range(6000)], axis=0)
    np.testing.assert_allclose(other, epsilon * 2 / 3, atol=0.02)
    assert other[0] == 0


def test_random_actions_are_uniform_over_the_allowed_ones() -> None:
    rng = np.random.default_rng(2)
    mask = np.array([[True, False, True, True, False], [False, False, False, False, True]])
    actions = np.stack([choose(np.zeros((2, 5)), fixed(1.0, 2), mask, rng) for _ in range(6000)])
    share = np.bincount(actions[:, 0], minlength=5) / 6000
    np.testing.assert_allclose(share, [1 / 3, 0, 1 / 3, 1 / 3, 0], atol=0.02)
    assert (actions[:, 1] == 4).all()
    unmasked = np.concatenate([choose(np.zeros((2, 5)), fixed(1.0, 2), None, rng) for _ in range(5000)])
    np.testing.assert_allclose(np.bincount(unmasked) / 10000, 0.2, atol=0.02)


@st.composite
def decisions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    q = draw(hnp.arrays(np.float32, shape, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    mask = draw(hnp.arrays(np.bool_, shape))
    mask[np.arange(shape[0]), draw(hnp.arrays(np.int64, shape[0], elements=st.integers(0, shape[1] - 1)))] = True
    return q, mask, draw(hnp.arrays(np.float32, shape[0], elements=st.sampled_from([0.0, 0.5, 1.0])))


@settings(deadline=None, max_examples=150)
@given(decision=decisions(), seed=st.integers(0, 2**32))
def test_trap_18_a_forbidden_action_is_never_chosen(decision: tuple[np.ndarray, ...], seed: int) -> None:
    q, mask, epsilon = decision
    actions = choose(q, epsilon, mask, np.random.default_rng(seed))
    assert actions.dtype == np.int64
    assert actions.shape == (len(q),)
    assert mask[np.arange(len(q)), actions].all()
    for row in np.flatnonzero(epsilon == 0):
        best = max((a for a in range(q.shape[1]) if mask[row, a]), key=lambda a: (q[row, a], -a))  # first of equals
        assert actions[row] == best


@settings(deadline=None, max_examples=50)
@given(decision=decisions(), seed=st.integers(0, 2**32))
def test_a_full_mask_is_no_mask_and_the_stream_does_not_depend_on_the_outcome(
    decision: tuple[np.ndarray, ...], seed: int
) -> None:
    q, _, epsilon = decision
    a, b, c = (np.random.default_rng(seed) for _ in range(3))
    with_mask = choose(q, epsilon, np.ones(q.shape, np.bool_), a)
    np.testing.assert_array_equal(with_mask, choose(q, epsilon, None, b))
    choose(-q, np.zeros_like(epsilon), None, c)
    assert a.bit_generator.state == b.bit_generator.state == c.bit_generator.state


def test_trap_8_epsilon_follows_the_steps_of_the_run_whoever_asks() -> None:
    config = EpsilonGreedyConfig(start=1.0, end=0.1, steps=1000)
    seen = [float(epsilons(config, step, 0, 1, 8)[0]) for step in (0, 250, 500, 1000, 5000)]
    np.testing.assert_allclose(seen, [1.0, 0.775, 0.55, 0.1, 0.1], rtol=1e-6)
    # Nothing is remembered: an actor built anew after a resume has the epsilon of the run's step, not of its own.
    np.testing.assert_array_equal(epsilons(config, 500, 6, 2, 8), np.full(2, 0.55, np.float32))
    assert epsilons(config, 0, 0, 3, 3).dtype == np.float32


@settings(deadline=None, max_examples=50)
@given(total=st.integers(1, 300), data=st.data())
def test_the_ladder_is_the_same_however_environments_are_shared_out(total: int, data: st.DataObject) -> None:
    config = LadderConfig()
    whole = epsilons(config, 0, 0, total, total)
    expected = [0.4 ** (1 + 7 * i / (total - 1)) if total > 1 else 0.4 for i in range(total)]
    np.testing.assert_allclose(whole, expected, rtol=1e-5)
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - first))
    np.testing.assert_array_equal(epsilons(config, 10**6, first, count, total), whole[first : first + count])


def test_without_exploration_all_actions_are_greedy() -> None:
    epsilon = epsilons(NoneConfig(), 0, 0, 3, 3)
    q = np.array([[1.0, 2.0], [3.0, 2.0], [0.0, 0.0]])
    np.testing.assert_array_equal(choose(q, epsilon, None, np.random.default_rng(0)), [1, 0, 0])


def test_configs_are_chosen_by_kind_and_refuse_nonsense() -> None:
    adapter: TypeAdapter[ExplorationConfig] = TypeAdapter(ExplorationConfig)
    for config in (EpsilonGreedyConfig(shape="exponential"), LadderConfig(), NoneConfig()):
        assert adapter.validate_python(config.model_dump()) == config
    for bad in (
        {"kind": "epsilon_greedy", "start": 1.5},
        {"kind": "epsilon_greedy", "end": None},
        {"kind": "epsilon_greedy", "end": 0.0, "shape": "exponential"},
        {"kind": "epsilon_greedy", "steps": 0},
        {"kind": "ladder", "base": 1.0},
        {"kind": "none", "start": 1.0},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(bad)
