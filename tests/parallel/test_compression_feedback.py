"""Error feedback: nothing is lost over time, learning converges with it, and a resumed run goes on to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compression_cases import KINDS, LOSSY, codec, compressor, flat_layers, normal, small_mlp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qfleet.core.codec import pack, unpack
from qfleet.core.errors import CheckpointError
from qfleet.parallel.compression.feedback import Compressor, ErrorFeedback

SIZE, LAYERS = flat_layers(small_mlp())


def options(kind: str) -> dict[str, Any]:
    return {"warmup": 5, "fraction": 0.05} if kind == "topk" else {}


@pytest.mark.parametrize("kind", LOSSY)
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.integers(-8, 4))
def test_what_was_sent_and_what_is_owed_are_all_gradients(kind: str, seed: int, updates: int, power: int) -> None:
    plain = {"momentum": 0.0} if kind == "topk" else {}
    sender = compressor(kind, SIZE, LAYERS, **options(kind), **plain)
    assert isinstance(sender, ErrorFeedback)
    received, given_in = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for update in range(updates):
        gradient = normal(SIZE, seed + update) * 10.0**power
        out = torch.zeros(SIZE)
        sender.codec.add(sender.encode(gradient), out)
        received, given_in = received + out, given_in + gradient
    torch.testing.assert_close(received + sender.residual, given_in, rtol=0, atol=updates * 4e-6 * 10.0**power)


def test_a_waiting_value_gathers_momentum_and_starts_again_once_sent() -> None:
    sender = compressor("topk", 4, fraction=0.25, momentum=0.5, warmup=0)
    sent = []
    for gradient in ([1.0, 0.0, 0.0, 0.0], [1.0, 4.0, 0.0, 0.0], [1.0, 0.0, 0.0, 9.0], [1.0, 0.0, 0.0, 0.0]):
        out = torch.zeros(4)
        sender.codec.add(sender.encode(torch.tensor(gradient)), out)
        sent.append(out.tolist())
    # The first value: sent as 1; then it waits with velocities 1 and 1 + 0.5; then those and 1 + 0.75 are sent.
    assert sent == [[1, 0, 0, 0], [0, 4, 0, 0], [0, 0, 0, 9], [4.25, 0, 0, 0]]


def distance_after_descent(sender: Compressor) -> float:
    """Return the root mean square distance to the minimum of a quadratic whose noise often points the wrong way."""
    size, goal, draws = 256, normal(256, 3), torch.Generator().manual_seed(4)
    position, sum_of_late, updates = torch.zeros(size), torch.zeros(size), 3000
    for update in range(updates):
        noise = torch.where(torch.rand(size, generator=draws) < 0.25, 3.0, -1.0)  # its mean is 0, its median is not
        step = torch.zeros(size)
        sender.codec.add(sender.encode(position - goal + noise), step)
        position -= 0.01 * step
        if update >= updates // 2:
            sum_of_late += position
    return float((sum_of_late / (updates // 2) - goal).square().mean().sqrt())


@pytest.mark.parametrize("kind", KINDS)
def test_descent_comes_to_the_minimum(kind: str) -> None:
    assert distance_after_descent(compressor(kind, 256, **options(kind))) < 0.1


def test_descent_by_signs_alone_ends_elsewhere() -> None:
    assert distance_after_descent(Compressor(codec("sign", 256))) > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_goes_on_bit_for_bit(kind: str) -> None:
    first = compressor(kind, SIZE, LAYERS, **options(kind))
    for update in range(3):
        first.encode(normal(SIZE, update))
    saved = unpack(*pack(first.state_dict()))
    later = [[part.clone() for part in first.encode(normal(SIZE, update))] for update in range(3, 9)]
    second = compressor(kind, SIZE, LAYERS, seed=99, **options(kind))
    second.encode(normal(SIZE, 50))
    second.load_state_dict(saved)
    for update, payload in enumerate(later, start=3):
        parts = zip(second.encode(normal(SIZE, update)), payload, strict=True)
        assert all(torch.equal(own, other) for own, other in parts)


def test_saved_state_is_a_copy() -> None:
    sender = compressor("topk", SIZE)
    sender.encode(normal(SIZE))
    saved = sender.state_dict()
    kept: dict[str, Tensor] = {name: saved[name].clone() for name in ("residual", "velocity")}
    for update in range(2):
        sender.encode(normal(SIZE, update))
    assert all(torch.equal(saved[name], value) for name, value in kept.items())


@pytest.mark.parametrize("kind", ["int8", "topk", "powersgd", "none"])
def test_foreign_state_is_refused(kind: str) -> None:
    sender = compressor(kind, SIZE, LAYERS)
    others = [
        compressor("sign", SIZE),
        compressor(kind, SIZE + 1, LAYERS),
        compressor("powersgd", SIZE, LAYERS, rank=2),
    ]
    for other in others if kind != "none" else others[:1]:
        with pytest.raises(CheckpointError, match="resume with the settings of the saved run"):
            sender.load_state_dict(other.state_dict())
