"""How far acting is behind learning: what the run's mean hides, what is seen of late, and that no clock decides it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from role_cases import Edge, random_batch
from test_learner import make_learner

from qfleet.core.codec import roundtrip
from qfleet.core.types import Batch, Version
from qfleet.roles.lag import RECENT
from qfleet.roles.learner import Learner

LEARNED = 3 * RECENT


def with_lags(lags: list[int], first: int = 0) -> list[Batch]:
    """Batches each of which comes from so many updates ago; those before are `first`."""
    rng = np.random.default_rng(0)
    batch = random_batch(rng, size=4)
    return [dataclasses.replace(batch, version=Version(0, first + n - lag)) for n, lag in enumerate(lags)]


def learn(learner: Learner, edges: dict[str, Edge], batches: list[Batch]) -> None:
    for batch in batches:
        edges["batches"].send(batch)
        learner.step()


def test_a_lag_that_grows_now_is_seen_though_the_mean_of_the_run_hides_it():
    learner, edges = make_learner()
    assert learner.metrics()["policy_lag"] == learner.metrics()["policy_lag_mean"] == 0
    learn(learner, edges, with_lags([0] * LEARNED))
    learn(learner, edges, with_lags([30] * RECENT, LEARNED))
    metrics = learner.metrics()
    assert metrics["policy_lag"] == 30
    assert metrics["policy_lag_mean"] == 7.5


def test_it_is_of_the_last_batches_whenever_one_looks():
    lags = np.random.default_rng(1).integers(0, 50, LEARNED).tolist()
    lags = [min(lag, n) for n, lag in enumerate(lags)]
    seldom, often = make_learner(), make_learner()
    learn(*seldom, with_lags(lags))
    for batch in with_lags(lags):
        learn(*often, [batch])
        often[0].metrics()
    for learner, _ in (seldom, often):
        assert learner.metrics()["policy_lag"] == pytest.approx(np.mean(lags[-RECENT:]))
        assert learner.metrics()["policy_lag_mean"] == pytest.approx(np.mean(lags))


def test_a_batch_of_several_updates_counts_as_many_times():
    learner, edges = make_learner(updates_per_draw=2)
    learn(learner, edges, with_lags([0] * 10))
    several = dataclasses.replace(random_batch(np.random.default_rng(0), size=4), updates=2, version=Version(0, 5))
    learn(learner, edges, [several])
    assert learner.metrics()["policy_lag"] == pytest.approx(2 * 5 / 12)


def test_a_restored_learner_goes_on_with_it_and_older_checkpoints_know_the_mean_only():
    learner, edges = make_learner()
    learn(learner, edges, with_lags([0] * LEARNED))
    learn(learner, edges, with_lags([20] * 10, LEARNED))
    state = roundtrip(learner.state_dict())
    again, again_edges = make_learner()
    again.load_state_dict(state)
    assert again.metrics()["policy_lag"] == learner.metrics()["policy_lag"] == 2
    del state["recent_lag"]
    again.load_state_dict(state)
    assert again.metrics()["policy_lag"] == again.metrics()["policy_lag_mean"] == pytest.approx(200 / 310)
    learn(again, again_edges, with_lags([5], LEARNED + 10))
    assert again.metrics()["policy_lag"] == 5
