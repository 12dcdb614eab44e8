from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rounded_products import _rounded_products  # noqa: F401  (a fixture for every test here)
from torch import Tensor

from qfleet.accel.kernels.conv import (
    Conv,
    Tile,
    conv_backward_input,
    conv_backward_weight,
    conv_forward,
    conv_partials,
)
from qfleet.accel.kernels.frames import frames_backward_weight, frames_forward
from qfleet.accel.kernels.head import Dense, head_backward, head_forward
from qfleet.accel.kernels.packing import BLOCK, Turned, fold, pack

SMALL = Tile(64, 16, 16, 4, 2)
LARGE = Tile(256, 64, 64, 4, 2)
FRAMES = Conv(84, 84, 4, 32, 8, 4)
NATURE = [Conv(20, 20, 32, 64, 4, 2), Conv(9, 9, 64, 64, 3, 1), Conv(1, 1, 448, 128)]
PADDED = [Conv(21, 21, 32, 64, 4, 2, padding=(2, 2), border=(1, 1)), Conv(11, 11, 64, 64, 3, 1, padding=(1, 1))]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)


@st.composite
def shapes(draw: st.DrawFn) -> Conv:
    kernel, stride = draw(st.sampled_from([(4, 2), (3, 1), (2, 2), (1, 1)]))
    side, edges = st.integers(kernel, kernel + 4), st.tuples(st.integers(0, 3), st.integers(0, 3))
    channels, outputs = draw(st.sampled_from([16, 32])), draw(st.sampled_from([16, 32]))
    return Conv(draw(side), draw(side), channels, outputs, kernel, stride, draw(edges), draw(edges))


class Case:
    """A layer on random images, with what torch says of it."""

    def __init__(self, conv: Conv, images: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.conv = conv
        self.images = normal(images, conv.height, conv.width, conv.channels)
        self.weights = normal(2, conv.outputs, conv.patch) / conv.patch**0.5
        self.biases = (normal(conv.outputs).float(), normal(conv.outputs).float())
        self.upstream = normal(images, conv.positions, conv.outputs)

    def outputs(self, images: Tensor, network: int) -> Tensor:
        return reference(self.conv, images, self.weights[network], self.biases[network])


def reference(conv: Conv, images: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Return the layer's output [I, positions, N] before ReLU by torch, in float32."""
    kernel = weights.float().view(conv.outputs, conv.kernel, conv.kernel, conv.channels).permute(0, 3, 1, 2)
    channels_first = images.float().permute(0, 3, 1, 2)
    return F.conv2d(channels_first, kernel, bias, conv.stride, conv.padding).flatten(2).transpose(1, 2)


def framed(images: Tensor, edges: tuple[int, int], value: float = 0.0) -> Tensor:
    """Return images [I, H, W, C] with so many rows above and below and columns on either side of one value."""
    return F.pad(images, (0, 0, edges[1], edges[1], edges[0], edges[0]), value=value)


def stored(conv: Conv, outputs: Tensor) -> Tensor:
    """Return outputs [I, positions, N] as they lie in memory [I, H, W, N] that was full of sevens."""
    return framed(outputs.unflatten(1, (conv.out_height, conv.out_width)), conv.border, 7.0)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (actual.float() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < TOLERANCE[dtype]


def check_forward(case: Case, online: int, tile: Tile, splits: int) -> None:
    conv, images, dtype = case.conv, case.images, case.images.dtype
    expected = torch.cat([case.outputs(images[:online], 0), case.outputs(images[online:], 1)])
    seen, whole = framed(images, conv.padding), stored(conv, expected.relu())
    out = torch.full_like(whole, 7.0, dtype=dtype)
    conv_forward(conv, tile, seen, online, case.weights, case.biases, out)
    assert_close(out, whole, dtype)
    assert torch.equal(out == 7.0, whole == 7.0), "the border is not to be written"
    parts = torch.full((splits, *expected.shape), 7.0, device=images.device)
    conv_partials(replace(conv, border=(0, 0)), tile, seen, online, case.weights, parts)
    biases = torch.where((torch.arange(len(images), device=images.device) < online)[:, None, None], *case.biases)
    assert_close(parts.sum(0), expected - biases, dtype)


def check_backward_input(case: Case, tile: Tile) -> None:
    conv, images = case.conv, case.images.float().requires_grad_()
    below = images.relu()
    below.retain_grad()
    reference(conv, below, case.weights[0], case.biases[0]).backward(case.upstream.float())
    out = torch.full_like(case.images, 7.0)
    seen = framed(case.images.relu(), conv.padding)
    conv_backward_input(conv, tile, case.upstream, case.weights[0], seen, out)
    assert images.grad is not None
    assert_close(out, images.grad, case.images.dtype)


def check_backward_weight(case: Case, tile: Tile, splits: int) -> None:
    conv, weights, bias = case.conv, case.weights[0].float().requires_grad_(), case.biases[0].clone().requires_grad_()
    reference(conv, case.images, weights, bias).backward(case.upstream.float())
    weight_out = torch.full((splits, conv.outputs, conv.patch), 7.0, device=case.images.device)
    bias_out = torch.full((splits, conv.outputs), 7.0, device=case.images.device)
    conv_backward_weight(conv, tile, framed(case.images, conv.padding), case.upstream, weight_out, bias_out)
    assert weights.grad is not None
    assert bias.grad is not None
    assert_close(weight_out.sum(0), weights.grad, case.images.dtype)
    assert_close(bias_out.sum(0), bias.grad, case.images.dtype)


@settings(max_examples=10, deadline=None)
@given(conv=shapes(), images=st.integers(1, 3), share=st.floats(0, 1), dtype=st.sampled_from(DTYPES))
def test_forward_equals_torch(conv: Conv, images: int, share: float, dtype: torch.dtype, device: torch.device) -> None:
    check_forward(Case(conv, images, dtype, device), round(share * images), SMALL, splits=1)


@settings(max_examples=10, deadline=None)
@given(conv=shapes(), images=st.integers(1, 3), dtype=st.sampled_from(DTYPES))
def test_gradient_of_the_input_equals_autograd(
    conv: Conv, images: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_backward_input(Case(conv, images, dtype, device), SMALL)


@settings(max_examples=10, deadline=None)
@given(conv=shapes(), images=st.integers(1, 3), splits=st.integers(1, 3), dtype=st.sampled_from(DTYPES))
def test_gradient_of_the_weights_equals_autograd(
    conv: Conv, images: int, splits: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_backward_weight(Case(conv, images, dtype, device), Tile(16, 16, 64, 4, 2), splits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("conv", [*NATURE, *PADDED])
def test_layers_of_the_nature_network(conv: Conv, dtype: torch.dtype, device: torch.device) -> None:
    case = Case(conv, 2, dtype, device)
    check_forward(case, 1, LARGE, splits=7 if conv.kernel == 1 else 1)
    check_backward_input(case, LARGE)
    check_backward_weight(case, Tile(64, 64, 64, 4, 2), splits=2)


@pytest.mark.parametrize("edges", [(0, 0), (2, 1)])
@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_bytes_are_scaled_and_seen_by_the_right_networks(
    double: bool, planes: bool, edges: tuple[int, int], device: torch.device
) -> None:
    conv = replace(FRAMES, height=20, width=28, padding=edges, border=edges[::-1])
    generator = torch.Generator().manual_seed(1)
    frames, following = (
        torch.randint(0, 256, (3, 20, 28, 4), generator=generator, dtype=torch.uint8).to(device) for _ in range(2)
    )
    case = Case(conv, 1, torch.float32, device)
    expected = [case.outputs(frames / 255, 0), case.outputs(following / 255, 0), case.outputs(following / 255, 1)]
    if not double:
        del expected[1]
    whole = stored(conv, torch.cat(expected).relu())
    out, weights = torch.full_like(whole, 7.0), case.weights
    frames, following = framed(frames, edges), framed(following, edges)
    if planes:
        frames, following = (image.permute(0, 3, 1, 2).contiguous() for image in (frames, following))
        weights = weights.unflatten(2, (64, 4)).transpose(2, 3).flatten(2)
    frames_forward(conv, Tile(64, 32, 64, 4, 2), frames, following, weights, case.biases, out, planes)
    assert_close(out, whole, torch.float32)


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize(("height", "width", "padding"), [(84, 84, (0, 0)), (22, 27, (0, 0)), (21, 26, (2, 3))])
def test_gradient_of_the_weights_on_bytes(
    height: int, width: int, padding: tuple[int, int], planes: bool, device: torch.device
) -> None:
    conv = replace(FRAMES, height=height, width=width, padding=padding)
    generator = torch.Generator().manual_seed(1)
    case = Case(conv, 2, torch.bfloat16, device)
    frames = torch.randint(0, 256, case.images.shape, generator=generator, dtype=torch.uint8).to(device)
    weights, bias = case.weights[0].float().requires_grad_(), case.biases[0].requires_grad_()
    reference(conv, frames / 255, weights, bias).backward(case.upstream.float())
    weight_out, bias_out = torch.full((3, 32, 256), 7.0, device=device), torch.full((3, 32), 7.0, device=device)
    seen = framed(frames, padding)
    seen = seen.permute(0, 3, 1, 2).contiguous() if planes else seen
    frames_backward_weight(conv, Tile(128, 64, 64, 4, 2), seen, case.upstream, weight_out, bias_out, planes)
    total = weight_out.sum(0)
    total = total.unflatten(1, (4, 64)).transpose(1, 2).flatten(1) if planes else total
    assert weights.grad is not None
    assert bias.grad is not None
    assert_close(total, weights.grad, torch.bfloat16)
    assert_close(bias_out.sum(0), bias.grad, torch.bfloat16)


def every_product(form: str, device: torch.device) -> list[Tensor]:
    """Return the sums of each kernel on the same numbers."""
    conv, on_bytes = Conv(6, 6, 16, 16, 3, 1), replace(FRAMES, height=20, width=20)
    case, first = Case(conv, 2, torch.float32, device), Case(on_bytes, 2, torch.float32, device)
    out, parts, below = (torch.zeros_like(like) for like in (case.upstream, case.upstream[None], case.images))
    conv_forward(conv, SMALL, case.images, 1, case.weights, case.biases, out, form)
    conv_partials(conv, SMALL, case.images, 1, case.weights, parts, form)
    conv_backward_input(conv, SMALL, case.upstream, case.weights[0], case.images, below, form)
    weight, bias = torch.zeros(1, 16, conv.patch, device=device), torch.zeros(1, 32, device=device)
    conv_backward_weight(conv, SMALL._replace(rows=16), case.images, case.upstream, weight, bias, form)
    frames = first.images.mul(50).to(torch.uint8)
    values, first_weight = torch.zeros_like(first.upstream), torch.zeros(1, 32, on_bytes.patch, device=device)
    tile = Tile(128, 32, 64, 4, 2)
    frames_forward(on_bytes, tile, frames, None, first.weights, first.biases, values, False, form)
    frames_backward_weight(on_bytes, tile, frames, first.upstream, first_weight, bias, False, form)
    return [out, parts, below, weight, values, first_weight]


def test_tf32_rounds_every_product_and_nothing_else_does(device: torch.device) -> None:
    for rounded, exact in zip(every_product("tf32", device), every_product("ieee", device), strict=True):
        assert 1e-5 < (rounded - exact).norm() / exact.norm() < 5e-3


def test_every_run_gives_the_same_bits(device: torch.device) -> None:
    case = Case(NATURE[1], 3, torch.bfloat16, device)
    runs = []
    for _ in range(2):
        weight_out, bias_out = torch.zeros(4, 64, 576, device=device), torch.zeros(4, 64, device=device)
        conv_backward_weight(NATURE[1], Tile(64, 64, 64, 4, 2), case.images, case.upstream, weight_out, bias_out)
        runs.append(weight_out)
    assert torch.equal(*runs)


def test_sides_that_do_not_fit_are_refused(device: torch.device) -> None:
    case = Case(Conv(5, 5, 16, 16, 3, 2), 1, torch.float32, device)
    with pytest.raises(ValueError, match="multiple of the stride 2"):
        conv_backward_input(case.conv, SMALL, case.upstream, case.weights[0], case.images, case.images)
    with pytest.raises(ValueError, match="32 does not divide 16"):
        conv_forward(case.conv, SMALL._replace(columns=32), case.images, 1, case.weights, case.biases, case.upstream)


@settings(max_examples=10, deadline=None)
@given(
    batch=st.integers(1, 9), double=st.booleans(), actions=st.integers(2, 18), splits=st.integers(1, 3),
    together=st.booleans(), parts=st.integers(1, 3),
)  # fmt: skip
def test_head_equals_autograd(
    batch: int, double: bool, actions: int, splits: int, together: bool, parts: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    online_rows = 2 * batch if double else batch
    sums = normal(parts, online_rows + batch, 128)
    online, target = (Dense(normal(128), normal(actions, 128), normal(actions)) for _ in range(2))
    inputs = sums.sum(0).requires_grad_()
    weight, bias = online.weight.clone().requires_grad_(), online.bias.clone().requires_grad_()
    kept = (inputs + torch.where(torch.arange(len(inputs), device=device)[:, None] < online_rows, *(
        network.hidden_bias for network in (online, target)
    ))).relu()  # fmt: skip
    expected = torch.cat([F.linear(kept[:online_rows], weight, bias), F.linear(kept[online_rows:], *target[1:])])
    hidden, q = torch.zeros(batch, 128, device=device), torch.full_like(expected, 7.0)
    head_forward(sums, online_rows, online, target, hidden, q, together)
    assert_close(q, expected, torch.float32)
    assert_close(hidden, kept[:batch], torch.float32)
    upstream = normal(batch, actions)
    expected[:batch].backward(upstream)
    slope, weight_out = torch.full_like(hidden, 7.0), torch.full((splits, actions, 128), 7.0, device=device)
    bias_out = torch.full((splits, actions), 7.0, device=device)
    head_backward(upstream, hidden, online.weight, slope, weight_out, bias_out)
    assert inputs.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    assert_close(slope, inputs.grad[:batch], torch.float32)
    assert_close(weight_out.sum(0), weight.grad, torch.float32)
    assert_close(bias_out.sum(0), bias.grad, torch.float32)


@pytest.mark.parametrize("networks", [1, 2])
def test_packing_turns_the_dense_layer_and_places_the_others(networks: int, device: torch.device) -> None:
    small, dense = 40, Turned(start=64, outputs=3, channels=8, pixels=5)
    generator = torch.Generator().manual_seed(0)
    flat = [torch.randn(64 + 120, generator=generator).to(device) for _ in range(networks)]
    places = torch.randperm(64, generator=generator)[:small].to(device, torch.int32)
    out = torch.zeros(networks, small + 120, device=device)
    pack(flat, places, dense, out)
    for network, packed in zip(flat, out, strict=True):
        assert torch.equal(packed[:small], network[places.long()])
        assert torch.equal(packed[small:].view(3, 5, 8), network[64:].view(3, 8, 5).transpose(1, 2))


def test_folding_adds_parts_and_leaves_the_rest_alone(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    partials = torch.randn(3 * BLOCK + 20 * BLOCK, generator=generator).to(device)
    parts = torch.tensor([[0, BLOCK, 3], [3 * BLOCK, BLOCK, 20]], dtype=torch.int32, device=device)
    places = torch.full((2 * BLOCK,), -1, dtype=torch.int32, device=device)
    where = torch.randperm(2 * BLOCK, generator=generator).to(device, torch.int32)
    places[:BLOCK], places[BLOCK : BLOCK + 9] = where[:BLOCK], where[BLOCK : BLOCK + 9]
    turned = torch.randn(2, 5 * 8, generator=generator).to(device)
    gradients = torch.full((2 * BLOCK + 80,), 7.0, device=device)
    fold(partials, parts, 20, places, turned, Turned(2 * BLOCK, 2, 8, 5), gradients)
    expected = torch.full_like(gradients, 7.0)
    expected[places[:BLOCK].long()] = partials[: 3 * BLOCK].view(3, BLOCK).sum(0)
    expected[places[BLOCK : BLOCK + 9].long()] = partials[3 * BLOCK :].view(20, BLOCK).sum(0)[:9]
    expected[2 * BLOCK :] = turned.view(2, 5, 8).transpose(1, 2).flatten()
    torch.testing.assert_close(gradients, expected)
