"""Packed weights: what readers make of them, whatever they missed; what is left out, what it costs, what is damaged."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from qfleet.algo.flat import checksum
from qfleet.core import codec
from qfleet.core.errors import QfleetError
from qfleet.core.types import Version, Weights
from qfleet.parallel.packing import Packer, Unpacker, packed_bytes
from qfleet.parallel.packing_config import DeltaWeights, PackingConfig

FORMS = ["bf16", "int8", "delta"]
SIZE, BUFFERS = 2600, 5
NATURE = 1_687_206


def form(kind: str, **options: Any) -> Any:
    return TypeAdapter(PackingConfig).validate_python({"kind": kind, **options})


def walk(seed: int, size: int = SIZE + BUFFERS, step: float = 0.01) -> Any:
    """Yield weights that move, the last words of which are the bits of counters."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=size).astype(np.float32)
    while True:
        values = values.copy()
        values[:-BUFFERS] += step * rng.normal(size=size - BUFFERS).astype(np.float32)
        values[-BUFFERS:] = rng.integers(2**32, size=BUFFERS, dtype=np.uint32).view(np.float32)
        yield values


def weights(values: np.ndarray, number: int, epoch: int = 0) -> Weights:
    return Weights(Version(epoch, number), values, checksum(values))


def int8_steps(values: np.ndarray) -> np.ndarray:
    """Return the step of each parameter's block [P]."""
    blocks = torch.from_numpy(values[:SIZE]).split(1024)
    return torch.cat([block.abs().amax().expand(len(block)) / 126.99 for block in blocks]).numpy()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    density=st.sampled_from([1e-4, 0.05, 1.0]),
    period=st.integers(1, 5),
    reads=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=12),
)
def test_whoever_missed_publications_or_joins_has_the_bits_of_whoever_followed(seed, density, period, reads):
    """Each reader sees the latest message and, if it needs it, the latest keyframe."""
    packer = Packer(form("delta", density=density, keyframe_period=period), SIZE)
    follower, others = Unpacker(SIZE), [Unpacker(SIZE) for _ in range(3)]
    latest = None
    for number, (values, reading) in enumerate(zip(walk(seed), reads, strict=False)):
        keyframe, message = codec.roundtrip(packer.pack(weights(values, number)))
        latest = keyframe or latest
        if keyframe is not None:
            follower.remember(keyframe)
        followed = follower.verified(message)
        assert followed[SIZE:].tobytes() == values[SIZE:].tobytes()
        for unpacker, reads_now in zip(others, reading, strict=True):
            if reads_now:
                if not unpacker.can_read(message):
                    unpacker.remember(latest)
                assert unpacker.can_read(message)
                assert unpacker.verified(message).tobytes() == followed.tobytes()


@pytest.mark.parametrize("kind", FORMS)
def test_every_form_is_as_near_as_it_says(kind):
    packer, unpacker = Packer(form(kind, **({"keyframe_period": 4} if kind == "delta" else {})), SIZE), Unpacker(SIZE)
    source = walk(1)
    first = next(source)
    for number, values in zip(range(12), source, strict=False):
        keyframe, message = packer.pack(weights(values, number))
        if keyframe is not None:
            unpacker.remember(keyframe)
            first = values
        off = np.abs(unpacker.verified(message) - values)[:SIZE]
        if kind == "bf16":
            assert (off <= np.abs(values[:SIZE]) * 2.0**-8).all()
        elif kind == "int8":
            assert (off <= int8_steps(values) * 0.501).all()
        else:  # the way since the keyframe, but for the places that went furthest
            gone = np.abs(values - first)[:SIZE] + int8_steps(first) * 0.501
            assert (off <= gone).all()
            left_out = np.sort(np.abs(values - first)[:SIZE])[: -int(SIZE * 0.1)].max()
            assert off.max() <= left_out + int8_steps(first).max() * 0.501 + np.abs(values - first).max() * 2.0**-4


def test_what_deltas_leave_out_never_adds_up_and_is_gone_when_the_weights_stand_still():
    """By the next keyframe the actors are within half a step of int8."""
    packer, unpacker = Packer(form("delta", density=0.1, keyframe_period=6), SIZE), Unpacker(SIZE)
    source, values, errors, still = walk(2), np.zeros(0), [], []
    for number in range(60):
        values = next(source) if number < 40 else values
        keyframe, message = packer.pack(weights(values, number))
        if keyframe is not None:
            unpacker.remember(keyframe)
        off = np.abs(unpacker.verified(message) - values)[:SIZE]
        errors.append(np.sqrt((off**2).mean()))
        if number >= 46:
            still.append(off)
    assert max(errors[30:40]) < 1.5 * max(errors[6:16]), "grows with the time since a keyframe, not with the run"
    rounding = int8_steps(values) * 0.501
    assert all((off <= rounding).all() for off in still)


def test_a_density_of_one_brings_the_whole_way_to_four_bits_and_leaves_what_the_keyframe_rounded():
    packer, unpacker = Packer(form("delta", density=1.0, keyframe_period=100), SIZE), Unpacker(SIZE)
    for number, values in zip(range(5), walk(3), strict=False):
        keyframe, message = packer.pack(weights(values, number))
        if keyframe is not None:
            unpacker.remember(keyframe)
            first, rounded = values[:SIZE], values[:SIZE] - unpacker.verified(keyframe)[:SIZE]
        way = values[:SIZE] - first
        off = values[:SIZE] - unpacker.verified(message)[:SIZE] - rounded
        assert (np.abs(off) <= np.abs(way) * 2.0**-4 + np.abs(way).max() * 2.0**-18 + 1e-6).all()


@pytest.mark.parametrize("kind", FORMS)
def test_damage_anywhere_is_noticed(kind):
    packer, source = Packer(form(kind), SIZE), walk(4)
    keyframe, message = packer.pack(weights(next(source), 0))
    _, message = packer.pack(weights(next(source), 1))
    for original in [message] if keyframe is None else [message, keyframe]:
        for part, tensor in enumerate(original.payload):
            for place in (0, len(tensor) // 2, -1):
                payload = [one.clone() for one in original.payload]
                payload[part].view(torch.uint8)[place * tensor.element_size()] ^= 64
                assert_refused(dataclasses.replace(original, payload=payload), keyframe)
            assert_refused(dataclasses.replace(original, payload=[one[:-1] for one in original.payload]), keyframe)
        assert_refused(dataclasses.replace(original, payload=original.payload[:-1]), keyframe)
        buffers = original.buffers.copy()
        buffers.view(np.uint8)[3] ^= 1
        assert_refused(dataclasses.replace(original, buffers=buffers), keyframe)
        assert_refused(dataclasses.replace(original, form="zip"), keyframe)


def assert_refused(message: Any, keyframe: Any) -> None:
    unpacker = Unpacker(SIZE)
    if keyframe is not None:
        unpacker.remember(keyframe)
    with pytest.raises(QfleetError, match=r"weights Version\(epoch=0, number=\d\) arrived damaged"):
        unpacker.verified(message)


def test_a_sender_that_died_begins_with_a_keyframe_that_all_its_readers_take():
    source, reader = walk(5), Unpacker(SIZE)
    packer = Packer(form("delta", keyframe_period=3), SIZE)
    packer.pack(weights(next(source), 0))
    kept = packer.state_dict()
    for number in range(1, 6):  # which go on to another keyframe, and are lost with the sender
        keyframe, message = packer.pack(weights(next(source), number))
        if keyframe is not None:
            reader.remember(keyframe)
    assert reader.can_read(message)
    again = Packer(form("delta", keyframe_period=3), SIZE)
    again.load_state_dict(kept)
    keyframe, message = again.pack(weights(next(source), 1, epoch=1))
    assert keyframe is not None
    assert not reader.can_read(message)
    reader.remember(keyframe)
    assert checksum(reader.verified(message)) == message.checksum


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_a_sender_goes_on_from_its_state_with_the_same_bytes(cut):
    values = [one for one, _ in zip(walk(6), range(9), strict=False)]
    packer = Packer(form("delta", keyframe_period=3), SIZE)
    for number in range(cut):
        packer.pack(weights(values[number], number))
    resumed = Packer(form("delta", keyframe_period=3), SIZE)
    resumed.load_state_dict(codec.roundtrip(packer.state_dict()))
    for number in range(cut, 9):
        one, other = (sender.pack(weights(values[number], number)) for sender in (packer, resumed))
        packed = [codec.pack(messages) for messages in (one, other)]
        assert packed[0][0] == packed[1][0]
        assert [a.tobytes() for a in packed[0][1]] == [a.tobytes() for a in packed[1][1]]


def test_a_publication_of_the_nature_network_takes_less_than_450_kb_on_average():
    usual = DeltaWeights()
    packer, source = Packer(usual, NATURE), walk(7, NATURE + BUFFERS)
    sizes = []
    values = next(source)
    for number in range(usual.keyframe_period + 1):
        keyframe, message = packer.pack(weights(values, number))
        sizes.append(packed_bytes(message) + (0 if keyframe is None else packed_bytes(keyframe)))
        values[:NATURE:7] *= 1.001
    assert sizes[0] == sizes[-1] < 1.01 * NATURE, "a keyframe is int8, and the delta with it empty"
    assert 2 * 0.1 * NATURE <= sizes[1] < 2.1 * 0.1 * NATURE
    assert np.mean(sizes[:-1]) < 450_000
