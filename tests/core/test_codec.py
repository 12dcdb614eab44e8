"""Whatever is data comes back as it was, bit by bit; whatever is not is refused."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qfleet.core.codec import pack, roundtrip, unpack
from qfleet.core.errors import CheckpointError
from qfleet.core.gradients import GRADIENT_MESSAGES, GradientPush, ParameterSlice
from qfleet.core.packed import PACKED_MESSAGES, PackedWeights
from qfleet.core.types import (
    MESSAGES,
    Batch,
    Evaluated,
    Experience,
    InferenceReply,
    InferenceRequest,
    Notice,
    Orders,
    Priorities,
    Rollout,
    SequenceBatch,
    Standing,
    Version,
    Weights,
)

ARRAY_TYPES = ["bool", "int8", "uint8", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64"]
TENSOR_TYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]

arrays = st.sampled_from(ARRAY_TYPES).flatmap(
    lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3))
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3))
    bits = draw(hnp.arrays(np.float32, shape, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
    return torch.from_numpy(np.array(bits)).to(draw(st.sampled_from(TENSOR_TYPES)))


scalars = (
    st.none()
    | st.booleans()
    | st.integers()  # far beyond 64 bits too: the state of a generator is one
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
keys = st.text(max_size=5) | st.integers(-5, 2**70)
values = st.recursive(
    scalars | arrays | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.numel() == 0 or torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, float) and math.isnan(a):
        assert math.isnan(b)
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


@settings(deadline=None, max_examples=200)
@given(value=values)
def test_any_tree_of_data_comes_back_bit_by_bit(value: Any) -> None:
    assert_same(value, roundtrip(value))


def messages() -> list[Any]:
    rng = np.random.default_rng(0)

    def leaves(*shape: int) -> dict[str, np.ndarray]:
        return {"observation": rng.integers(255, size=shape, dtype=np.uint8), "a.b": rng.random(shape)}

    def floats(*shape: int) -> np.ndarray:
        return rng.random(shape, np.float32)

    def ints(*shape: int) -> np.ndarray:
        return rng.integers(9, size=shape)

    def bools(*shape: int) -> np.ndarray:
        return rng.random(shape) < 0.5

    version = Version(1, 2)
    weights = Weights(version, floats(5), 2**32 - 1, env_steps=2**40)
    return [
        version,
        Experience(
            "actor-0", 7, version, ints(2), ints(3), leaves(3, 2), ints(3), floats(3), bools(3), bools(3), bools(3),
            mask=bools(3, 2), cut=ints(1), extras=leaves(3),
        ),
        Batch(leaves(4, 2), ints(4), floats(4), floats(4), leaves(4, 2), floats(4), ints(4), ints(4), global_size=8),
        SequenceBatch(
            leaves(2, 3), ints(2, 2), floats(2, 2), bools(2, 2), bools(2, 2), {}, floats(2), ints(2), ints(2)
        ),
        Rollout(
            version, leaves(3, 2), ints(2, 2), floats(2, 2), bools(2, 2), bools(2, 2), bools(2, 2),
            leaves(1), ints(1, 2),
        ),
        Priorities(ints(2), ints(2), floats(2)),
        Standing(2.5, 1.0),
        weights,
        InferenceRequest(2**40, leaves(3), floats(3, 5)),
        InferenceReply(2**40, version, floats(3, 2)),
        Evaluated(version, 10, rng.random(3), ints(3), 0.5, True, weights),
        Orders((8, 4), (1.5,)),
        Notice("learner", 0, "nan", "the update was skipped"),
        GradientPush(2, 7, 3, [torch.arange(3.0), torch.zeros(2, dtype=torch.uint8)]),
        ParameterSlice(1, 9, floats(4), 2**62, ints(3), 0.1, final=True),
        PackedWeights(version, "bf16", [torch.ones(3, dtype=torch.bfloat16)], floats(2), 2**62, base=2**61),
    ]  # fmt: skip


@pytest.mark.parametrize("message", messages(), ids=lambda message: type(message).__name__)
def test_every_message_comes_back(message: Any) -> None:
    copy = roundtrip(message)
    assert_same(message, copy)
    assert_same({"nested": [message, (message,)]}, roundtrip({"nested": [message, (message,)]}))


def test_no_message_class_is_left_out_here() -> None:
    assert {type(message) for message in messages()} == {*MESSAGES, *GRADIENT_MESSAGES, *PACKED_MESSAGES}


def test_packing_copies_no_array_and_a_roundtrip_shares_none() -> None:
    array = np.arange(6)
    header, arrays_out = pack({"a": array})
    assert arrays_out[0] is array
    assert unpack(header, arrays_out)["a"] is array
    assert not np.shares_memory(roundtrip(array), array)
    tensor = torch.arange(6.0)
    roundtrip(tensor).zero_()
    assert tensor.sum() == 15


def test_strided_arrays_and_tensors_keep_their_values() -> None:
    array, tensor = np.arange(24).reshape(4, 6)[::2, ::3], torch.arange(24.0).reshape(4, 6).T[::2]
    np.testing.assert_array_equal(roundtrip(array), array)
    assert torch.equal(roundtrip(tensor), tensor)
    assert torch.equal(roundtrip(nn_parameter := torch.nn.Parameter(torch.ones(2))), nn_parameter.detach())


def test_numpy_scalars_become_plain_numbers() -> None:
    assert_same(roundtrip([np.float32(0.5), np.int64(3), np.bool_(True)]), [0.5, 3, True])


class Foreign:
    pass


@pytest.mark.parametrize(
    "value", [object(), Foreign(), Foreign, len, {1, 2}, np.array([None]), np.array([object()]), [{"a": Foreign()}]]
)
def test_what_is_not_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="not data"):
        pack(value)


@pytest.mark.parametrize(
    "content", [(9, b"\x00"), (2, msgpack.packb(["Popen", ["ls"]])), (2, msgpack.packb(["eval", []]))]
)
def test_unknown_entries_and_classes_are_refused(content: tuple[int, bytes]) -> None:
    with pytest.raises(CheckpointError, match="another version or damaged"):
        unpack(msgpack.packb(msgpack.ExtType(*content)), [])


def test_no_array_outlives_its_message() -> None:
    """A cycle of references would keep it until the garbage collector comes."""
    gc.collect()
    gc.disable()
    try:
        sent = Weights(Version(0, 1), np.zeros(1000, np.float32), 0, 0)
        header, arrays = pack(sent)
        received = unpack(header, [array.copy() for array in arrays])
        alive = [weakref.ref(sent.flat), weakref.ref(received.flat)]
        del sent, arrays, received
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()
