"""Many largest values in two bytes each: which they are, how near, and ways that are too long for one byte."""

from __future__ import annotations

import pytest
import torch
from compression_cases import decoded, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.parallel.compression.codec import payload_bytes
from qfleet.parallel.compression.config import TopKConfig
from qfleet.parallel.compression.gaps import GapCodec

CPU = torch.device("cpu")


def gap_codec(size: int, fraction: float) -> GapCodec:
    return GapCodec(TopKConfig(fraction=fraction, warmup=0), size, CPU)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 3000),
    fraction=st.sampled_from([0.001, 0.02, 0.3, 1.0]),
    scale=st.integers(-20, 15),
    filled=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_the_largest_values_come_back_at_their_places_to_four_bits(size, fraction, scale, filled, seed):
    vector = normal(size, seed) * 10.0**scale
    vector[int(filled * size) :] = 0.0
    form = gap_codec(size, fraction)
    payload = form.encode(vector)
    places = form.places(payload)
    count = min(max(1, int(size * fraction)), int((vector != 0).sum()))
    assert len(places) == count
    assert torch.equal(vector[places].abs().sort().values, vector.abs().sort().values[size - count :])
    assert payload_bytes(payload) <= 4 + 2 * count + size // 255
    expected = torch.zeros(size).index_copy_(0, places, vector[places])
    nothing = float(vector.abs().max()) * 2.0**-18  # what is so small beside the largest is lost
    torch.testing.assert_close(decoded(form, vector), expected, rtol=2.0**-4, atol=nothing)


@pytest.mark.parametrize("places", [[0], [254], [255], [256], [0, 255], [0, 256], [511, 767, 999], [3, 999], []])
def test_places_may_be_as_far_apart_as_they_like(places):
    vector = torch.zeros(1000).index_fill_(0, torch.tensor(places, dtype=torch.long), -3.0)
    form = gap_codec(1000, max(len(places), 1) / 1000)
    assert form.places(form.encode(vector)).tolist() == places
    assert torch.equal(decoded(form, vector), vector)
