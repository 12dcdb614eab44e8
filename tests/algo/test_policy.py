"""Policy: raw observations in the environment's own form in, the environment's own actions out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algo_cases import MIXED, PIXELS, STATES, VECTOR, leaves
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.algo.agent import ReplayAgent, TabularAgent
from qfleet.algo.heads import ImplicitQuantileConfig
from qfleet.algo.networks import build_network
from qfleet.algo.policy import Policy
from qfleet.algo.torsos import MlpConfig, NatureConfig, SmallCnnConfig, TabularConfig
from qfleet.core.spec import PLAIN

STATES_COUNT = STATES.observations[PLAIN].categories


def make(spec, network=None, agent=None):
    network = build_network(network or MlpConfig(hidden=(8, 8)), agent or ReplayAgent(), spec, 0)
    return Policy(network, spec)


@pytest.mark.parametrize(
    ("spec", "network"), [(VECTOR, None), (PIXELS, NatureConfig()), (STATES, MlpConfig(hidden=(8,)))]
)
def test_batches_and_single_observations_agree(spec, network):
    policy = make(spec, network)
    observations = leaves(spec, np.random.default_rng(0), 5)[PLAIN]
    actions, q = policy.act(observations), policy.q(observations)
    assert actions.shape == (5,)
    assert actions.dtype == np.int64
    assert q.shape == (5, spec.actions)
    np.testing.assert_array_equal(actions, q.argmax(1))
    assert [policy.act(one) for one in observations] == actions.tolist()
    np.testing.assert_allclose([policy.q(one) for one in observations], q, atol=1e-6)
    assert policy.act(observations[:0]).shape == (0,)


def test_feed_forward_policies_have_an_empty_state():
    policy = make(VECTOR)
    state = policy.initial_state(3)
    actions, state = policy.act(np.zeros((3, 4)), state)
    assert state == ()
    assert actions.shape == (3,)


def test_nested_dict_observations_and_lists_of_numbers():
    policy = make(MIXED, SmallCnnConfig(channels=(4,), dense=8))
    raw = leaves(MIXED, np.random.default_rng(0), 3)
    nested = {"camera": {"front": raw["camera.front"]}, "gear": raw["gear"].tolist(), "speed": raw["speed"].tolist()}
    np.testing.assert_array_equal(policy.act(nested), policy.act(raw))
    single = {"camera": {"front": raw["camera.front"][1]}, "gear": int(raw["gear"][1]), "speed": raw["speed"][1]}
    assert policy.act(single) == policy.act(raw)[1]


def test_actions_come_in_the_environments_own_numbers():
    observations = leaves(VECTOR, np.random.default_rng(0), 20)[PLAIN]
    plain = make(VECTOR).act(observations)
    shifted = Policy(make(VECTOR).network, VECTOR.replace(action_start=5))
    np.testing.assert_array_equal(shifted.act(observations), plain + 5)
    parts = VECTOR.replace(actions=6, action_shape=(2, 3))
    policy = make(parts)
    joint = policy.q(observations).argmax(1)
    np.testing.assert_array_equal(policy.act(observations), np.stack([joint // 3, joint % 3], 1))
    assert policy.act(observations[0]).shape == (2,)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_trap_18_forbidden_actions_are_never_chosen(seed):
    rng = np.random.default_rng(seed)
    policy = make(VECTOR.replace(masked=True))
    observations, mask = leaves(VECTOR, rng, 12)[PLAIN], rng.random((12, 3)) < 0.5
    mask[:, 1] |= ~mask.any(1)
    actions = policy.act(observations, mask=mask)
    assert mask[np.arange(12), actions].all()
    np.testing.assert_array_equal(actions, np.where(mask, policy.q(observations), -np.inf).argmax(1))
    own_form = {"observation": observations, "action_mask": mask.astype(np.int8)}
    np.testing.assert_array_equal(policy.act(own_form), actions)
    assert policy.act(observations[0], mask=mask[0]) == actions[0]


def test_trap_10_acting_is_free_of_noise_and_repeatable():
    agent = ReplayAgent(noisy=True, head=ImplicitQuantileConfig())
    network = build_network(MlpConfig(dropout=0.5), agent, VECTOR, 0)
    policy = Policy(network, VECTOR)
    observations = leaves(VECTOR, np.random.default_rng(0), 9)[PLAIN]
    first = policy.q(observations)
    network.resample_noise(torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(policy.q(observations), first)


def test_read_only_and_double_precision_arrays_are_taken():
    policy = make(VECTOR)
    observations = np.random.default_rng(0).standard_normal((6, 4))
    observations.flags.writeable = False
    frozen = observations.astype(np.float32)
    frozen.flags.writeable = False
    np.testing.assert_array_equal(policy.act(observations), policy.act(frozen))


def test_plain_python_numbers_in_lists_and_tuples_are_observations():
    policy = make(VECTOR)
    batch = np.array([[0, 0, 0, 0], [1, -2, 3, 4]], np.float32)
    expected = policy.act(batch).tolist()
    for form in ([(0, 0, 0, 0), (1, -2, 3, 4)], ((0, 0, 0, 0), (1, -2, 3, 4)), [[0, 0, 0, 0], [1.0, -2, 3, 4]]):
        assert policy.act(form).tolist() == expected
        assert policy.act({"observation": form}).tolist() == expected
    assert policy.act((1, -2, 3, 4)) == policy.act(batch[1])
    assert policy.act((0, 0, 2**24, True)) == policy.act(np.array([0, 0, 2**24, 1], np.float32))
    nested = make(MIXED, SmallCnnConfig(channels=(4,), dense=8))
    raw = {name: leaf[0] for name, leaf in leaves(MIXED, np.random.default_rng(0), 1).items()}
    assert nested.act({**raw, "speed": tuple(raw["speed"].tolist())}) == nested.act(raw)


def test_tuple_observations_keep_their_parts():
    vector = VECTOR.observations[PLAIN]
    policy = make(VECTOR.replace(observations={"0": vector, "1": vector}))
    parts = leaves(policy.spec, np.random.default_rng(0), 5)
    np.testing.assert_array_equal(policy.act((parts["0"], parts["1"])), policy.act(parts))
    assert policy.act(((0, 0, 0, 0), (1, 2, 3, 4))).shape == ()


@pytest.mark.parametrize(
    ("spec", "arguments", "words"),
    [
        (VECTOR, {"observations": np.zeros(5)}, r"'observation' has the shape \(5,\); the model takes \(4,\)"),
        (VECTOR, {"observations": np.zeros((2, 2, 4))}, "has the shape"),
        (VECTOR, {"observations": {"a": np.zeros(4), "b": np.zeros(4)}}, r"not \['a', 'b'\]"),
        (VECTOR, {"observations": np.zeros(4), "mask": [True]}, r"mask must have the shape \(1, 3\)"),
        (VECTOR.replace(masked=True), {"observations": np.zeros(4)}, "pass mask="),
        (VECTOR, {"observations": np.zeros(4), "mask": [False] * 3}, r"mask of observation 0 allows no action"),
        (VECTOR, {"observations": None}, r"'observation' must be numbers, not NoneType"),
        (VECTOR, {"observations": object()}, r"'observation' must be numbers, not object"),
        (VECTOR, {"observations": "left"}, r"'observation' must be numbers, not str"),
        (VECTOR, {"observations": [None] * 4}, r"'observation' must be numbers, not an array of object"),
        (VECTOR, {"observations": [["1", "2", "3", "4"]]}, r"'observation' must be numbers, not an array of <U1"),
        (VECTOR, {"observations": np.zeros(4, complex)}, r"'observation' must be numbers, not an array of complex128"),
        (VECTOR, {"observations": [[1.0, 2.0], [3.0]]}, r"'observation' must be numbers in a regular array"),
        (VECTOR, {"observations": [[0.0] * 4, [0.0, 0.0, np.nan, 0.0]]}, r"'observation' is nan at \[1, 2\]"),
        (VECTOR, {"observations": [0.0, np.inf, 0.0, 0.0]}, r"'observation' is inf at \[1\]"),
        (VECTOR, {"observations": [0.0, 0.0, 0.0, -1e300]}, r"'observation' is -inf at \[3\] as float32"),
        (VECTOR, {"observations": (0, 0, 2**24 + 1, 0)}, r"'observation' is 16777217 at \[2\].*float32"),
        (
            PIXELS,
            {"observations": np.full(PIXELS.observations[PLAIN].shape, 0.5)},
            "trained on raw uint8: pass it unsc",
        ),
        (PIXELS, {"observations": np.full(PIXELS.observations[PLAIN].shape, 256)}, r"is 256 at \[0, 0, 0\].*uint8"),
        (STATES, {"observations": np.zeros(3)}, "float64 but the model was trained on raw int64"),
        (STATES, {"observations": [0, STATES_COUNT]}, rf"'observation' is {STATES_COUNT} at \[1\].*categories"),
        (STATES, {"observations": -1}, r"'observation' is -1.*categories"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(spec, arguments, words):
    with pytest.raises(ValueError, match=words):
        make(spec).act(**arguments)


def test_a_table_is_a_policy_too():
    policy = make(STATES, TabularConfig(), TabularAgent())
    with torch.no_grad():
        policy.network.head.table[2, 1] = 1.0
    assert policy.act(np.array([2, 3])).tolist() == [1, 0]
    assert policy.act(2) == 1
