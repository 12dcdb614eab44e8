"""A copy of the replay's observations elsewhere: row numbers and what is new make the same batches."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_replay import History, make_spec

from qfleet.accel import mirror
from qfleet.accel.mirror import ReplayMirror
from qfleet.algo.batch import to_tensors
from qfleet.core import codec
from qfleet.core.spec import EnvSpec
from qfleet.replay import Replay, ReplayConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make(spec: EnvSpec) -> Replay:
    config = ReplayConfig(capacity=120, segment=4)
    return Replay(config, spec, streams=3, n_step=2, gamma=0.9, rng=np.random.default_rng(7))


class Kept:
    """What a learner sees of a shard's memory."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def rows(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        array = self._replay.store.observations[name.removeprefix("observation.")].array
        assert (array.shape[1:], array.dtype) == (shape, dtype)
        return array


def make_mirror(replay: Replay, whole: bool = False) -> ReplayMirror:
    return ReplayMirror(replay.spec.observations, Kept(replay), DEVICE, whole)


def assert_same(mirrored: ReplayMirror, batch, plain) -> None:
    mirrored.bring_up(batch.fresh)
    seen = mirrored.seen(to_tensors(batch, DEVICE))
    for found, wanted in ((seen.observation, plain.observation), (seen.next_observation, plain.next_observation)):
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(found[name].cpu().numpy(), wanted[name])
    np.testing.assert_array_equal(batch.reward, plain.reward)
    np.testing.assert_array_equal(batch.index, plain.index)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1), stack=st.integers(1, 4), padding=st.sampled_from(["zero", "repeat"]),
    lag=st.integers(0, 3), draws=st.floats(0.1, 1.0), piece=st.integers(1, 9),
)  # fmt: skip
def test_a_mirror_reads_what_the_replay_would_have_sent(seed, stack, padding, lag, draws, piece):
    """Also when the reader is some batches late while segments are dropped and written anew."""
    spec, rng = make_spec(stack, padding, False), np.random.default_rng(seed)
    replay, twin = make(spec), make(spec)
    replay.store.mirror()
    history, late = History(spec, 3, seed), deque()
    mirrored = make_mirror(replay)
    before, mirror.PIECE = mirror.PIECE, piece
    try:
        for _ in range(120):
            message = history.message()
            replay.append(message)
            twin.append(message)
            if len(twin) and rng.random() < draws:
                late.append((codec.roundtrip(replay.sample(5)), twin.sample(5)))
            while len(late) > lag:
                assert_same(mirrored, *late.popleft())
    finally:
        mirror.PIECE = before
    assert replay.chains.handed_out > replay.chains.segments  # rows were written anew


def test_one_that_is_begun_anew_brings_up_every_row():
    spec = make_spec(4, "zero", False)
    replay, twin, history = make(spec), make(spec), History(spec, 3, 5)
    replay.store.mirror()
    for _ in range(30):
        message = history.message()
        replay.append(message)
        twin.append(message)
    replay.sample(5)  # told to the one that died
    twin.sample(5)
    assert_same(make_mirror(replay, whole=True), replay.sample(5), twin.sample(5))


def test_a_replay_that_is_begun_anew_names_all_of_its_rows():
    spec = make_spec(1, "zero", False)
    replay, history = make(spec), History(spec, 3, 5)
    for _ in range(30):
        replay.append(history.message())
    replay.store.mirror()
    fresh = replay.sample(5).fresh
    assert set(replay.sampler.items()) <= set(fresh)
