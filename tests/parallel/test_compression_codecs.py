"""Each compressed form by itself: how far off it is, how many bytes it takes, and what its bits mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compression_cases import KINDS, LOSSY, codec, decoded, flat_layers, generator, nature, normal, settings, small_mlp
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from qfleet.parallel.compression.blocks import BLOCK
from qfleet.parallel.compression.codec import payload_bytes
from qfleet.parallel.compression.powersgd import Matrix
from qfleet.parallel.compression.signs import STRETCH, VALUES
from qfleet.parallel.compression.topk import TopKCodec

quick = hypothesis_settings(max_examples=40, deadline=None)


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Vectors around the sizes where blocks, bytes and rows end, of any scale, some of their values zero."""
    size = draw(st.sampled_from([1, 7, 8, 9, 31, 33, 1023, 1024, 1025, 2048, 3000]))
    vector = normal(size, seed=draw(st.integers(0, 1000))) * 10.0 ** draw(st.integers(-20, 15))
    return vector * (normal(size, seed=1) > draw(st.sampled_from([-9.0, 0.0, 1.5, 9.0])))


def block_maxima(vector: Tensor) -> Tensor:
    """Return the largest size in each value's block [P]."""
    return torch.cat([block.abs().amax().expand(len(block)) for block in vector.split(BLOCK)])


@quick
@given(vectors())
def test_int8_is_off_by_less_than_a_step_of_its_block(vector: Tensor) -> None:
    steps = block_maxima(vector) / 126.9 + 1e-30
    assert (decoded(codec("int8", len(vector)), vector) - vector).abs().le(steps).all()


@quick
@given(vectors())
def test_sign_is_each_stretchs_mean_size_with_the_right_signs(vector: Tensor) -> None:
    result = decoded(codec("sign", len(vector)), vector)
    means = torch.cat([part.abs().mean().expand(len(part)) for part in vector.split(STRETCH)])
    means *= means >= means.amax() * 2.0**-31  # less is left for later
    torch.testing.assert_close(result, torch.where(vector >= 0, means, -means), rtol=0.045, atol=0)
    assert (result - vector).norm() <= vector.norm() * 1.00001, "error feedback needs a contraction"


@quick
@given(st.integers(1, 70), st.integers(30, 300), st.integers(0, 9), st.integers(-20, 15))
def test_signs_of_a_matrix_are_right_wherever_it_lies(rows: int, columns: int, before: int, power: int) -> None:
    matrix, size = Matrix(before, rows, columns), before + rows * columns + 3
    vector = normal(size) * 10.0**power
    result = decoded(codec("sign", size, [matrix]), vector)
    assert torch.equal(result >= 0, vector >= 0)
    assert (result - vector).norm() <= vector.norm()


def test_sign_tells_the_sizes_of_rows_and_columns() -> None:
    """Where each has a factor of its own, signs whose rows and columns differ in size 1,000 times are nearly read."""
    matrix = Matrix(7, 450, 500)
    assert matrix.rows + matrix.columns <= matrix.rows * matrix.columns // VALUES
    vector = normal(matrix.stop + 5)
    rows, columns = (10.0 ** (3 * torch.rand(length, generator=generator(length))) for length in (450, 500))
    matrix.of(vector).copy_(torch.outer(rows, columns) * matrix.of(vector).sign())
    result = decoded(codec("sign", len(vector), [matrix]), vector)
    torch.testing.assert_close(matrix.of(result), matrix.of(vector), rtol=0.15, atol=0)


@quick
@given(st.integers(0, 1000), st.sampled_from([0.0, 1.0, 2.0, 3.5]))
def test_signs_of_a_matrix_never_leave_out_more_than_there_was(seed: int, least: float) -> None:
    """Few values in it, in any places: products of means would be far too large where a full row meets a column."""
    vector = normal(4096, seed)
    vector *= vector.abs() > least
    vector.view(64, 64)[seed % 64, 1:] = 1.0
    vector.view(64, 64)[1:, seed % 64] = 1.0
    result = decoded(codec("sign", 4096, [Matrix(0, 64, 64)]), vector)
    assert (result - vector).norm() <= vector.norm()


@quick
@given(vectors())
def test_bf16_and_fp16_round_to_nearest_and_never_to_infinity(vector: Tensor) -> None:
    bf16, fp16 = decoded(codec("bf16", len(vector)), vector), decoded(codec("fp16", len(vector)), vector)
    assert (bf16 - vector).abs().le(vector.abs() * 2.0**-8).all()
    nearest = torch.from_numpy(np.clip(vector.numpy(), -65504, 65504).astype(np.float16).astype(np.float32))
    assert torch.equal(fp16, nearest)


@quick
@given(vectors(), st.sampled_from([0.001, 0.01, 0.2, 1.0]))
def test_topk_sends_exactly_the_largest(vector: Tensor, fraction: float) -> None:
    form = codec("topk", len(vector), fraction=fraction, warmup=0)
    assert isinstance(form, TopKCodec)
    payload = form.encode(vector)
    places = form.places(payload)
    count = max(1, int(len(vector) * fraction))
    assert len(places.unique()) == count
    largest = vector.abs().topk(count).values  # which of equal ones is free
    assert torch.equal(vector[places].abs().sort(descending=True).values, largest)
    expected = torch.zeros_like(vector)
    expected[places] = vector[places]
    torch.testing.assert_close(decoded(form, vector), expected, rtol=2.0**-11, atol=float(largest[0]) * 2.0**-25)


def test_topk_places_reach_over_many_spans() -> None:
    places = torch.tensor([0, 65535, 65536, 131071, 131072, 299_999])
    vector = torch.zeros(300_000).index_fill_(0, places, -3.0)
    form = codec("topk", len(vector), fraction=6 / 300_000, warmup=0)
    assert isinstance(form, TopKCodec)
    assert torch.equal(form.places(form.encode(vector)), places)
    assert torch.equal(decoded(form, vector), vector)


def test_sign_bits_are_those_numpy_packs() -> None:
    vector = normal(2053)
    packed = codec("sign", 2053).encode(vector)[-1]
    assert np.array_equal(np.unpackbits(packed.numpy(), count=2053, bitorder="little"), vector.numpy() >= 0)


def test_int8_is_right_on_average() -> None:
    vector, form, total, draws = normal(1500), codec("int8", 1500), torch.zeros(1500), 4000
    for _ in range(draws):
        form.add(form.encode(vector), total)
    off = total / draws - vector
    # a rounded value has a variance of at most a quarter of a squared step
    deviation = block_maxima(vector) / 126.99 / 2 / draws**0.5
    assert off.abs().le(deviation * 5).all()
    assert off.div(deviation).mean().abs() < 5 / 1500**0.5, "no common shift either"


def test_int8_rounds_at_random_with_the_generator_it_was_given() -> None:
    vector = normal(2000)
    first, second = codec("int8", 2000), codec("int8", 2000)
    once = first.encode(vector)
    assert torch.equal(once[1], second.encode(vector)[1])
    assert not torch.equal(once[1], first.encode(vector)[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 1, 2, 5, 33])
def test_empty_and_tiny_vectors_and_zeros(kind: str, size: int) -> None:
    form = codec(kind, size, **({"warmup": 0} if kind == "topk" else {}))
    assert decoded(form, normal(size)).isfinite().all()
    assert torch.equal(decoded(form, torch.zeros(size)), torch.zeros(size))


@pytest.mark.parametrize("kind", KINDS)
def test_adding_is_scaled_and_leaves_vector_and_payload_alone(kind: str) -> None:
    size, layers = flat_layers(small_mlp())
    vector = normal(size)
    form, before = codec(kind, size, layers), vector.clone()
    payload = form.encode(vector)
    assert torch.equal(vector, before)
    vector.zero_()  # a payload shares no memory with the vector
    once, twice = torch.zeros(size), torch.ones(size)
    form.add(payload, once)
    form.add(payload, twice, alpha=-0.5)
    torch.testing.assert_close(twice, 1 - once / 2)
    assert once.norm() > 0


@pytest.mark.parametrize("network", [nature(), small_mlp()])
@pytest.mark.parametrize(
    ("kind", "fewer"), [("none", 1), ("fp16", 2), ("bf16", 2), ("int8", 3.9), ("sign", 30), ("topk", 250)]
)
def test_bytes(kind: str, fewer: float, network: nn.Module) -> None:
    size, layers = flat_layers(network)
    form = codec(kind, size, layers, **({"warmup": 0} if kind == "topk" else {}))
    payload = form.encode(normal(size))
    assert payload_bytes(payload) == sum(len(part.view(torch.uint8)) for part in payload)
    assert 4 * size / payload_bytes(payload) >= fewer


def test_powersgd_bytes_by_its_rank() -> None:
    size, layers = flat_layers(nature())
    assert 4 * size / payload_bytes(codec("powersgd", size, layers, rank=4).encode(normal(size))) > 70
    assert 4 * size / payload_bytes(codec("powersgd", size, layers, rank=1).encode(normal(size))) > 230


@pytest.mark.parametrize("kind", LOSSY)
def test_parts_with_larger_elements_come_first(kind: str) -> None:
    sizes = [part.element_size() for part in codec(kind, 3000).encode(normal(3000))]
    assert sizes == sorted(sizes, reverse=True), "so that each is aligned when they are put into one piece"


def test_warmup_falls_exponentially_from_a_quarter() -> None:
    form = codec("topk", 100_000, fraction=0.0025, warmup=10)
    assert isinstance(form, TopKCodec)
    counts = []
    for seed in range(14):
        assert form.kept == len(form.encode(normal(100_000, seed))[3])
        counts.append(form.kept)
    ratios = np.divide(counts[:9], [25_000, *counts[:8]])
    assert np.allclose(ratios, 0.01**0.1, rtol=0.01)
    assert counts[9:] == [250] * 5


def test_a_fraction_above_the_start_of_the_warmup_stays() -> None:
    form = codec("topk", 1000, fraction=0.5, warmup=10)
    assert len(form.encode(normal(1000))[3]) == 500


@pytest.mark.parametrize(
    "wrong", [{"fraction": 0.0}, {"fraction": 1.5}, {"momentum": 1.0}, {"warmup": -1}, {"speed": 1}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        settings("topk", **wrong)
