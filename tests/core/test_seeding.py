"""Streams are reproducible, independent of each other and of the global ones, and can be saved."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core.codec import roundtrip
from qfleet.core.seeding import numpy_state, numpy_stream, restore_numpy, torch_stream

KEYS = list(itertools.product((0, 1, 2**40), ("actor", "learner"), (0, 1, 17), ("", "explore", "reset")))


def test_every_purpose_has_its_own_stream() -> None:
    draws = {tuple(numpy_stream(*key).integers(2**63, size=2)) for key in KEYS}
    assert len(draws) == len(KEYS)
    draws = {tuple(torch.randint(2**62, (2,), generator=torch_stream(*key)).tolist()) for key in KEYS}
    assert len(draws) == len(KEYS)


def test_streams_of_neighbours_are_uncorrelated() -> None:
    draws = np.stack([numpy_stream(0, "actor", index).random(4000) for index in range(8)])
    assert np.abs(np.corrcoef(draws) - np.eye(8)).max() < 0.08


def test_the_same_key_gives_the_same_stream_whatever_was_drawn_elsewhere() -> None:
    first = numpy_stream(3, "actor", 1, "explore").random(5)
    numpy_stream(3, "actor", 0).random(1000)
    np.testing.assert_array_equal(numpy_stream(3, "actor", 1, "explore").random(5), first)


def test_the_global_streams_are_left_alone() -> None:
    before = torch.get_rng_state()
    legacy = np.random.get_state()[1].copy()  # noqa: NPY002  (the very thing that must not change)
    torch.rand(3, generator=torch_stream(0, "learner"))
    numpy_stream(0, "learner").random(3)
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**63),
    draws=st.lists(st.sampled_from(["random", "integers", "normal", "permutation"]), max_size=8),
)
def test_a_saved_stream_goes_on_exactly(seed: int, draws: list[str]) -> None:
    def draw(generator: np.random.Generator, name: str) -> np.ndarray:
        if name == "integers":  # 32-bit draws leave half a word behind, which is part of the state
            return generator.integers(5, size=3, dtype=np.int32)
        if name == "permutation":
            return generator.permutation(5)
        return getattr(generator, name)(size=3)

    generator = numpy_stream(seed, "actor")
    for name in draws:
        draw(generator, name)
    state = roundtrip(numpy_state(generator))
    expected = [draw(generator, name) for name in ("integers", *draws, "random")]
    resumed = numpy_stream(1, "other")
    restore_numpy(resumed, state)
    for name, values in zip(("integers", *draws, "random"), expected, strict=True):
        np.testing.assert_array_equal(draw(resumed, name), values)


def test_a_saved_state_is_not_changed_by_drawing_on() -> None:
    generator = numpy_stream(0, "actor")
    state = numpy_state(generator)
    first = generator.random(100)
    restore_numpy(generator, state)
    np.testing.assert_array_equal(generator.random(100), first)


def test_a_torch_stream_can_be_saved() -> None:
    generator = torch_stream(0, "learner")
    torch.rand(7, generator=generator)
    state = roundtrip({"generator": generator.get_state()})
    expected = torch.randn(5, generator=generator)
    resumed = torch_stream(9, "other")
    resumed.set_state(state["generator"])
    assert torch.equal(torch.randn(5, generator=resumed), expected)
