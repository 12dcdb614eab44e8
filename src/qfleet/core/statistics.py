"""What can be said of a few scores: mean, interquartile mean, and bootstrap intervals, as recommended for RL results.

Scores are arranged as [runs] or [runs, tasks]; a resample draws runs with replacement within each task (stratified).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Scores = NDArray[np.float64]
Statistic = Callable[[Scores], Scores]
"""Reduces the last axis, which holds the scores of all runs and tasks: [..., K] -> [...]."""


class Estimate(NamedTuple):
    """A statistic and its confidence interval."""

    value: float
    low: float
    high: float


def mean(scores: Scores) -> Scores:
    """Return the mean over the last axis, [..., K] -> [...]."""
    return np.asarray(scores.mean(axis=-1))


def iqm(scores: Scores) -> Scores:
    """Return the interquartile mean over the last axis, [..., K] -> [...]: a quarter is cut off at each end.

    The quarter is rounded down, so that fewer than four scores are all kept.
    """
    count = scores.shape[-1]
    cut = count // 4
    return mean(np.sort(scores, axis=-1)[..., cut : count - cut])


def estimate(
    scores: ArrayLike,
    statistic: Statistic,
    rng: np.random.Generator,
    resamples: int = 2000,
    confidence: float = 0.95,
) -> Estimate:
    """Return a statistic of `scores` [R] or [R, T] with its percentile interval from a stratified bootstrap.

    Uses 8 * resamples * R * T bytes.
    """
    table = np.asarray(scores, np.float64)
    if table.size == 0:
        raise ValueError("there are no scores to make an estimate of")
    table = table.reshape(len(table), -1)
    runs, tasks = table.shape
    drawn = table[rng.integers(runs, size=(resamples, runs, tasks)), np.arange(tasks)]
    tail = 50 * (1 - confidence)
    low, high = np.percentile(statistic(drawn.reshape(resamples, -1)), [tail, 100 - tail])
    return Estimate(float(statistic(table.ravel())), float(low), float(high))


def mean_ci95(values: ArrayLike, rng: np.random.Generator) -> Estimate:
    """Return the mean of one task's values [R] (episodes, or seeds) and its 95 % bootstrap interval."""
    return estimate(np.ravel(np.asarray(values)), mean, rng)
