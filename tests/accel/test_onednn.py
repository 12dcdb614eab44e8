"""Dense layers by oneDNN: the values and gradients of torch's own layers, whatever lies how in memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from qfleet.accel import onednn
from qfleet.accel.choices import Job, choose
from qfleet.accel.choose import workload
from qfleet.accel.config import AccelConfig
from qfleet.accel.onednn import LEAST, ROWS, compute_by_onednn
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import NatureConfig
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.usercode import UserCode

if not torch.backends.mkldnn.is_available():
    pytest.skip("this torch has no oneDNN, so that nothing is computed by it", allow_module_level=True)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda rows: rows,
    "transposed": lambda rows: rows.t().contiguous().t(),
    "every second row": lambda rows: rows.repeat_interleave(2, 0)[::2],
    "every second column": lambda rows: rows.repeat_interleave(2, 1)[:, ::2],
    "one row for all": lambda rows: rows[:1].expand(len(rows), -1),
}
sizes = st.integers(1, 40)
by_onednn = partial(compute_by_onednn, accel=AccelConfig(), foreign=False)


@given(sizes, sizes, sizes, st.booleans(), st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS)))
def test_values_and_gradients_are_those_of_torchs_own_layer(
    batch: int, inputs: int, outputs: int, bias: bool, seen: str, wanted: str
) -> None:
    torch.manual_seed(batch)
    own = nn.Linear(inputs, outputs, bias=bias)
    ours, plain = copy.deepcopy(own), torch.randn(batch, inputs)
    upstream = LAYOUTS[wanted](torch.randn(batch, outputs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "LEAST", 1)
        assert by_onednn(ours)
        found = []
        for layer in (own, ours):
            leaf = plain.clone().requires_grad_()
            values = layer(LAYOUTS[seen](leaf))
            values.backward(upstream)
            found.append([values.detach(), leaf.grad, *(parameter.grad for parameter in layer.parameters())])
    assert "Dense" in type(values.grad_fn).__name__
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_only_what_needs_a_gradient_gets_one() -> None:
    layer = nn.Linear(512, 512)
    layer.weight.requires_grad_(False)
    assert by_onednn(layer)
    rows = torch.randn(64, 512)
    layer(rows).sum().backward()
    assert rows.grad is None
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_small_products_and_small_layers_stay_as_they_are() -> None:
    large, small = nn.Linear(512, 512), nn.Linear(8, 8)
    assert ROWS * small.weight.numel() < LEAST
    assert by_onednn(nn.Sequential(large, small))
    assert not by_onednn(small)
    assert "Addmm" in type(large(torch.randn(1, 512)).grad_fn).__name__
    assert "Dense" in type(large(torch.randn(64, 512)).grad_fn).__name__


def test_other_formats_and_further_axes_are_left_to_torch() -> None:
    layer = nn.Linear(512, 512)
    by_onednn(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(64, 512)).dtype == torch.bfloat16
    assert layer(torch.randn(8, 8, 512)).shape == (8, 8, 512)


def test_a_copy_computes_with_its_own_weights() -> None:
    layer, rows = nn.Linear(512, 512), torch.randn(64, 512)
    by_onednn(layer)
    target = copy.deepcopy(layer)
    with torch.no_grad():
        before = target(rows)
        layer.weight.zero_()
        torch.testing.assert_close(target(rows), before, rtol=0, atol=0)
        assert (layer(rows) == layer.bias).all()


def test_a_gradient_can_be_differentiated_as_torchs_own_can() -> None:
    """Its derivative was 0 without a word, so that a network with a gradient penalty had none."""
    own = nn.Linear(512, 512)
    ours, penalties = copy.deepcopy(own), []
    by_onednn(ours)
    for layer in (own, ours):
        rows = torch.ones(64, 512, requires_grad=True)
        (slope,) = torch.autograd.grad(layer(rows).square().sum(), rows, create_graph=True)
        slope.square().mean().backward()
        penalties.append(layer.weight.grad)
    assert penalties[0].abs().max() > 0
    torch.testing.assert_close(penalties[1], penalties[0], rtol=1e-4, atol=1e-4)


def test_whoever_switches_kernels_off_or_brings_a_network_of_ones_own_has_torchs_products() -> None:
    assert not compute_by_onednn(nn.Linear(512, 512), AccelConfig(kernels="off"), foreign=False)
    assert not compute_by_onednn(nn.Linear(512, 512), AccelConfig(), foreign=True)


def test_a_network_can_be_pickled_as_before() -> None:
    layer, rows = nn.Linear(512, 512), torch.randn(64, 512)
    by_onednn(layer)
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(rows), layer(rows), rtol=0, atol=0)


def test_a_run_saved_before_there_was_onednn_goes_on_with_other_last_bits() -> None:
    frames = EnvSpec(
        name="frames", observations={PLAIN: LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)}, actions=3
    )
    agent, optim, code = ReplayAgent(), AdamConfig(), UserCode()
    network = build_network(NatureConfig(), agent, frames, seed=0)
    work = workload(agent, NatureConfig(), optim, frames, code)
    choices = choose(Job(AccelConfig(), agent, optim, torch.device("cpu"), work), network)
    assert choices.onednn
    older = {name: value for name, value in choices.fingerprint.items() if name != "onednn"}
    assert choices.differ_from(older)
    assert not choices.differ_from(choices.fingerprint)
    assert not choices.differ_from({})
