"""Priorities that new items get from the actor's own values, against a computation from whole episodes."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_replay import History, NaiveReplay, make_spec

from qfleet.core.spec import LeafSpec
from qfleet.core.types import Priorities, SequenceBatch
from qfleet.replay import PrioritisedConfig, Replay, ReplayConfig, SequenceWindow

GAMMA = 0.9
ACTOR = PrioritisedConfig(initial="actor")


def make(stack: int = 1, n_step: int = 3, segments: int = 8, **more: Any) -> Replay:
    config = ReplayConfig(capacity=5 * segments, segment=5, sampler=ACTOR)
    rng = np.random.default_rng(0)
    return Replay(config, make_spec(stack), streams=3, n_step=n_step, gamma=GAMMA, rng=rng, **more)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), stack=st.integers(1, 3), n_step=st.integers(1, 4), messages=st.integers(1, 40))
def test_an_item_begins_with_the_error_of_its_window(seed: int, stack: int, n_step: int, messages: int) -> None:
    replay = make(stack, n_step, extras={"hidden": make_spec().observations["pixels"]})
    naive = NaiveReplay(replay.spec, 8, 5, n_step, GAMMA, None)
    history, rng = History(replay.spec, 3, seed), np.random.default_rng(seed)
    for _ in range(messages):
        message = history.message()
        count = len(message.stream)
        value, best = rng.standard_normal((2, count)).astype(np.float32)
        hidden = np.stack([value, best, best], axis=1)  # the naive model keeps these with their rows
        naive.append(dataclasses.replace(message, extras={"hidden": hidden}))
        stored = {"hidden": np.zeros((count, 3), np.uint8)}
        replay.append(dataclasses.replace(message, value=value, best=best, extras=stored))
    expected = {}
    for episode in naive.episodes:
        for t, row in enumerate(episode.rows):
            steps = naive._steps(episode, t)
            if row.index in naive.items() and steps is not None and not row.evicted and not row.final:
                found = naive._transition(episode, t, steps)
                best = float(episode.rows[t + steps].extra[1])
                expected[row.index] = abs(found["reward"] + found["discount"] * best - float(row.extra[0]))
    items = replay.sampler.items()
    assert items.tolist() == sorted(expected)
    wanted = (np.array([expected[row] for row in items.tolist()]) + ACTOR.epsilon) ** ACTOR.alpha
    np.testing.assert_allclose(replay.sampler.tree.get(items), wanted, rtol=1e-6)  # type: ignore[attr-defined]


def filled(replay: Replay, value: float, best: float) -> Replay:
    history = History(replay.spec, 3, 0, end=0.01, cut=0.0)
    for _ in range(10):
        message = history.message()
        ones = np.ones(len(message.stream), np.float32)
        values = {"value": value * ones, "best": best * ones}
        replay.append(dataclasses.replace(message, reward=0 * ones, extras={}, **values))
    return replay


def test_the_first_write_back_leaves_them_alone() -> None:
    replay = filled(make(), value=3.0, best=0.0)
    items = replay.sampler.items()
    before = replay.sampler.tree.get(items).copy()  # type: ignore[attr-defined]
    generation = replay.chains.generation[items[:1] // replay.chains.rows]
    replay.update_priorities(Priorities(items[:1], generation, np.array([0.5], np.float32)))
    np.testing.assert_array_equal(replay.sampler.tree.get(items)[1:], before[1:])  # type: ignore[attr-defined]


def test_a_value_that_is_not_finite_makes_no_priority_that_is_not() -> None:
    replay = filled(make(), value=np.nan, best=np.inf)
    assert len(replay) > 0
    assert np.isfinite(replay.sample(4).weight).all()


def test_values_come_exactly_when_they_are_wanted() -> None:
    message = dataclasses.replace(History(make_spec(), 3, 0).message(), extras={})
    with pytest.raises(ValueError, match="initial"):
        make().append(message)
    plain = Replay(
        ReplayConfig(capacity=100), make_spec(), streams=3, n_step=1, gamma=GAMMA, rng=np.random.default_rng(0)
    )
    ones = np.ones(len(message.stream), np.float32)
    with pytest.raises(ValueError, match="initial"):
        plain.append(dataclasses.replace(message, value=ones, best=ones))


def judged(batch: SequenceBatch, value: Any, best: Any) -> Any:
    """A priority in which everything has a part that one may depend on."""
    errors = np.abs(batch.reward + np.where(batch.terminated, 0, GAMMA * best[:, 1:]) - value) * batch.valid
    return 2 * errors.max(1) + errors.mean(1) + np.abs(best).sum(1) + batch.extras["hidden"][:, 0]


def judged_by_hand(rows: list[Any], length: int) -> float:
    """The same of one sequence with the row after it; each row has its value and highest value as its extra."""
    after, errors = rows[1:] + rows[-1:] * (length + 1 - len(rows)), []
    for row, following in pairwise(rows):
        errors.append(abs(row.reward + (0 if row.terminated else GAMMA * following.extra[1]) - row.extra[0]))
    highest = abs(rows[0].extra[1]) + sum(abs(row.extra[1]) for row in after)
    return float(2 * max(errors) + sum(errors) / length + highest + rows[0].extra[2])


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    stack=st.integers(1, 3),
    length=st.integers(1, 7),
    period=st.integers(1, 4),
    burn_in=st.integers(0, 3),
    messages=st.integers(1, 40),
)
def test_a_sequence_begins_with_what_its_judge_makes_of_it(
    seed: int, stack: int, length: int, period: int, burn_in: int, messages: int
) -> None:
    window = SequenceWindow(length=length, burn_in=min(burn_in, length - 1), period=period)
    hidden = {"hidden": LeafSpec(shape=(1,), dtype="float32")}
    replay = make(stack, segments=20, sequence=window, judge=judged, extras=hidden)
    naive = NaiveReplay(replay.spec, 20, 5, 1, GAMMA, window)
    history, rng = History(replay.spec, 3, seed), np.random.default_rng(seed)
    for _ in range(messages):
        message = history.message()
        value, best, state = rng.standard_normal((3, len(message.stream))).astype(np.float32)
        state = np.abs(state)
        naive.append(dataclasses.replace(message, extras={"hidden": np.stack([value, best, state], axis=1)}))
        stored = {"hidden": state[:, None]}
        replay.append(dataclasses.replace(message, value=value, best=best, extras=stored))
    expected = {}
    for episode in naive.episodes:
        for t, row in enumerate(episode.rows):
            steps = naive._steps(episode, t)
            if steps and row.index in naive.items() and not row.evicted and not row.final:
                expected[row.index] = judged_by_hand(episode.rows[t : t + steps + 1], length)
    items = replay.sampler.items()
    assert items.tolist() == sorted(expected)
    wanted = (np.array([expected[row] for row in items.tolist()]) + ACTOR.epsilon) ** ACTOR.alpha
    np.testing.assert_allclose(replay.sampler.tree.get(items), wanted, rtol=1e-5)  # type: ignore[attr-defined]


def test_a_judge_that_is_not_finite_makes_no_priority_that_is_not() -> None:
    window = SequenceWindow(length=4, period=2)

    def broken(batch: SequenceBatch, value: Any, best: Any) -> Any:
        return np.where(np.arange(len(value)) % 2, np.inf, np.nan)

    replay = filled(make(sequence=window, judge=broken), value=1.0, best=1.0)
    assert len(replay) > 0
    assert np.isfinite(replay.sample_sequences(4).weight).all()
