"""The statistics equal those of rliable and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import trim_mean

from qfleet.core.statistics import Scores, estimate, iqm, mean, mean_ci95

tables = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 12), st.integers(1, 5)), elements=st.floats(-1e6, 1e6, allow_subnormal=False)
)


@settings(deadline=None, max_examples=100)
@given(scores=tables)
def test_point_estimates_equal_rliable(scores: Scores) -> None:
    from rliable import metrics  # here, since it takes seconds of every test process otherwise

    flat = scores.ravel()
    assert iqm(flat) == pytest.approx(trim_mean(flat, 0.25), rel=1e-9, abs=1e-6)
    assert iqm(flat) == pytest.approx(metrics.aggregate_iqm(scores), rel=1e-9, abs=1e-6)
    assert mean(flat) == pytest.approx(metrics.aggregate_mean(scores), rel=1e-9, abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(scores=tables)
def test_each_row_is_reduced_on_its_own(scores: Scores) -> None:
    for statistic in (mean, iqm):
        np.testing.assert_array_equal(statistic(scores), [statistic(row) for row in scores])


@pytest.mark.parametrize(("ours", "theirs"), [(iqm, "aggregate_iqm"), (mean, "aggregate_mean")])
@pytest.mark.parametrize("shape", [(5, 3), (10, 1), (3, 8)])
def test_intervals_equal_rliable_on_the_same_resamples(ours, theirs, shape, monkeypatch) -> None:
    from rliable import library, metrics

    def aggregated(x):
        return np.array([getattr(metrics, theirs)(x)])

    scores = np.random.default_rng(0).gamma(2.0, size=shape)
    theirs_rng = np.random.default_rng(1)
    monkeypatch.setattr(np.random, "choice", lambda n, size, replace: theirs_rng.integers(n, size=size))
    points, intervals = library.get_interval_estimates({"a": scores}, aggregated, reps=500)
    result = estimate(scores, ours, np.random.default_rng(1), resamples=500)
    np.testing.assert_allclose(result, [points["a"][0], *intervals["a"].ravel()], rtol=1e-12)


def test_resampling_stays_within_a_task() -> None:
    scores = np.tile([0.0, 100.0, 1000.0], (6, 1))  # runs agree, tasks differ: no uncertainty at all
    assert estimate(scores, mean, np.random.default_rng(0)) == pytest.approx((1100 / 3,) * 3)


def test_a_wider_confidence_is_a_wider_interval_around_the_value() -> None:
    scores = np.random.default_rng(0).normal(size=30)
    narrow, wide = (estimate(scores, mean, np.random.default_rng(0), confidence=c) for c in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = [abs_low <= 0.0 <= high for _, abs_low, high in (mean_ci95(rng.normal(size=40), rng) for _ in range(400))]
    assert 0.90 <= np.mean(inside) <= 0.98


def test_the_same_generator_gives_the_same_interval() -> None:
    values = [1.0, 5.0, 2.0, 8.0]
    assert mean_ci95(values, np.random.default_rng(3)) == mean_ci95(values, np.random.default_rng(3))
    assert mean_ci95([4.0], np.random.default_rng(3)) == (4.0, 4.0, 4.0)


def test_no_scores_are_an_error() -> None:
    with pytest.raises(ValueError, match="no scores"):
        mean_ci95([], np.random.default_rng(0))
