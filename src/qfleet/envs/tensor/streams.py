"""Random numbers without a generator's state: each is a function of a seed, a tick and its place in the tick."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qfleet.core.types import Floats, Ints

Words = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIT = np.float32(2**-24)


def stream_keys(seeds: Sequence[int]) -> Words:
    """Return where the streams of E seeds begin: far apart, even for seeds that follow one another."""
    return _mixed(np.array([seed % 2**64 for seed in seeds], np.uint64) + _GOLDEN)


def uniforms(keys: Words, ticks: Ints, draws: int) -> Floats:
    """Return the numbers [E, draws] in [0, 1) of each stream [E] at its own tick [E], multiples of 2**-24.

    Number n of a stream is what SplitMix64 gives in its nth step, so any of them costs the same.
    """
    numbers = (ticks[:, None] * draws + np.arange(1, draws + 1)).astype(np.uint64)
    return (_mixed(keys[:, None] + numbers * _GOLDEN) >> np.uint64(40)).astype(np.float32) * _UNIT


def _mixed(words: Words) -> Words:
    """Return SplitMix64's finaliser of words: every bit of the result depends on every bit given."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
