"""The flat buffer is the network: the same numbers before and after, and every bit of them travels."""

from __future__ import annotations

import copy
import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from qfleet.algo.flat import FlatParameters, checksum
from qfleet.core.errors import ConfigError, QfleetError


class Odd(nn.Module):
    """Everything that is awkward to flatten, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.tied = nn.Linear(3, 5)
        self.tied.weight = self.first.weight
        self.normed = nn.BatchNorm1d(5)
        self.spectral = spectral_norm(nn.Linear(5, 2))
        self.register_buffer("allowed", torch.tensor([True, False, True]))
        self.register_buffer("precise", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("count", torch.tensor([-1, 2**62 + 1]))
        self.register_buffer("scratch", torch.ones(7), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.spectral(self.normed(self.first(x) + self.tied(x)))


def odd(seed: int) -> Odd:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Odd()


def inputs(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))


def assert_equal_state(a: nn.Module, b: nn.Module) -> None:
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert torch.equal(x, y), name


def test_flattening_changes_no_output_and_no_gradient() -> None:
    plain, flattened = odd(0), odd(0)
    flat = FlatParameters(flattened)
    assert_equal_state(plain, flattened)
    for step in range(3):
        outputs = [module(inputs(step)) for module in (plain, flattened)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
    for (name, p), (_, q) in zip(plain.named_parameters(), flattened.named_parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad), name
    assert_equal_state(plain, flattened)
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(flat.gradients.norm(), norm)


def test_gradient_views_survive_backward_and_accumulate_in_place() -> None:
    module = odd(0)
    flat = FlatParameters(module)
    addresses = [p.grad.data_ptr() for p in module.parameters() if p.grad is not None]
    module.eval()
    module(inputs(0)).sum().backward()
    once = flat.gradients.clone()
    assert once.abs().sum() > 0
    module(inputs(0)).sum().backward()
    torch.testing.assert_close(flat.gradients, 2 * once)
    assert addresses == [p.grad.data_ptr() for p in module.parameters() if p.grad is not None]
    flat.zero_grad()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in module.parameters())


def test_writing_the_flat_tensor_writes_the_network() -> None:
    module = nn.Linear(3, 2)
    flat = FlatParameters(module)
    flat.parameters.fill_(2.0)
    assert torch.equal(module(torch.ones(1, 3)), torch.full((1, 2), 8.0))


def test_every_tensor_starts_aligned_and_tied_ones_are_held_once() -> None:
    module = odd(0)
    flat = FlatParameters(module)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in module.state_dict().values())
    assert module.first.weight.data_ptr() == module.tied.weight.data_ptr()
    held = sum(p.numel() for p in module.parameters())
    assert held <= flat.parameters.numel() <= held + 3 * len(list(module.parameters()))


def test_transfer_is_exact_for_buffers_of_every_type() -> None:
    source, target = odd(1), odd(2)
    source(inputs(0))  # moves running statistics, spectral vectors and the counter of batches
    a, b = FlatParameters(source), FlatParameters(target)
    b.load_numpy(a.to_numpy())
    assert_equal_state(source, target)
    assert target.normed.num_batches_tracked == 1
    assert target.count.tolist() == [-1, 2**62 + 1]
    target.normed.num_batches_tracked.add_(2**40)
    a.copy_from(b)
    assert source.normed.num_batches_tracked == 2**40 + 1
    assert checksum(a.to_numpy()) == checksum(b.to_numpy())


@pytest.mark.parametrize("length", [1, 2, 7, 64, 1001])
def test_the_checksum_is_the_sum_of_64_bit_words_and_sees_every_changed_word(length: int) -> None:
    flat = np.random.default_rng(length).standard_normal(length).astype(np.float32)
    raw = flat.tobytes()
    whole = sum(int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8))
    assert checksum(flat) == whole % 2**64 % 2**63
    for at in range(0, length, max(length // 7, 1)):
        torn = flat.copy()
        torn[at] += 1.0
        assert checksum(torn) != checksum(flat)


def test_buffers_outside_the_state_stay_where_they_are() -> None:
    source, target = odd(1), odd(1)
    source.scratch.fill_(5.0)
    FlatParameters(target).load_numpy(FlatParameters(source).to_numpy())
    assert target.scratch.tolist() == [1.0] * 7


def test_to_numpy_is_a_copy_and_a_received_array_may_be_read_only() -> None:
    flat = FlatParameters(odd(1))
    array = flat.to_numpy()
    before = array.copy()
    flat.parameters.zero_()
    assert array.tobytes() == before.tobytes()
    array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flat.load_numpy(array)
    assert flat.to_numpy().tobytes() == before.tobytes()


def test_soft_update_averages_parameters_and_copies_buffers() -> None:
    source, target = odd(1), odd(2)
    source(inputs(0))
    a, b = FlatParameters(source), FlatParameters(target)
    expected = b.parameters + 0.25 * (a.parameters - b.parameters)
    b.lerp_from(a, 0.25)
    torch.testing.assert_close(b.parameters, expected)
    for (name, x), (_, y) in zip(source.named_buffers(), target.named_buffers(), strict=True):
        assert torch.equal(x, y), name
    b.lerp_from(a, 1.0)
    assert torch.equal(a.parameters, b.parameters)


def test_weights_of_another_network_are_refused_and_change_nothing() -> None:
    flat = FlatParameters(nn.Linear(3, 2))
    before = checksum(flat.to_numpy())
    for wrong in (np.zeros(3, np.float32), np.zeros((2, 6), np.float32), flat.to_numpy().astype(np.float64)):
        with pytest.raises(ConfigError, match="do not fit"):
            flat.load_numpy(wrong)
    assert checksum(flat.to_numpy()) == before


def test_checksum_sees_one_flipped_bit() -> None:
    array = FlatParameters(odd(0)).to_numpy()
    flipped = array.copy()
    flipped.view(np.uint32)[-1] ^= 1
    assert checksum(array) != checksum(flipped)


def test_parameters_of_other_types_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"0\.weight is torch\.float64"):
        FlatParameters(nn.Sequential(nn.Linear(2, 2).double()))


def test_a_buffer_that_a_network_replaces_is_noticed() -> None:
    module = odd(0)
    flat = FlatParameters(module)
    module.precise = module.precise + 1  # a new tensor: the flat buffer would keep the old value for ever
    with pytest.raises(QfleetError, match="precise"):
        flat.to_numpy()
    with pytest.raises(QfleetError, match="in place"):
        flat.load_numpy(np.zeros(1, np.float32))


def test_whatever_is_replaced_is_noticed_and_scratch_may_be() -> None:
    def replaced(change) -> str:
        module = odd(0)
        flat = FlatParameters(module)
        change(module)
        with pytest.raises(QfleetError, match="in place") as caught:
            flat.to_numpy()
        return str(caught.value)

    assert "first.bias" in replaced(lambda module: setattr(module.first, "bias", nn.Parameter(torch.zeros(5))))
    assert "normed" in replaced(lambda module: setattr(module, "normed", nn.BatchNorm1d(5)))
    assert "normed" in replaced(lambda module: delattr(module, "normed"))
    assert "spectral.parametrizations.weight.original" in replaced(lambda module: module.double())
    module = odd(0)
    flat = FlatParameters(module)
    module.scratch = torch.zeros(7)
    flat.to_numpy()


def test_a_flattened_network_can_be_saved_and_copied(tmp_path) -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    FlatParameters(module)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    twin = copy.deepcopy(module)
    FlatParameters(twin).parameters.zero_()
    assert all(torch.equal(saved[name], tensor) for name, tensor in module.state_dict().items())
    assert twin[0].weight.abs().sum() == 0


def test_a_network_without_tensors_is_empty_not_an_error() -> None:
    flat = FlatParameters(nn.Flatten())
    flat.load_numpy(flat.to_numpy())
    assert flat.parameters.shape == (0,)


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5), seed=st.integers(0, 2**31))
def test_any_sizes_travel_bit_by_bit(sizes: list[int], seed: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))

    source, target = FlatParameters(module := build()), FlatParameters(other := build())
    source.parameters.normal_(generator=torch.Generator().manual_seed(seed))
    target.load_numpy(source.to_numpy())
    assert_equal_state(module, other)
    assert checksum(target.to_numpy()) == checksum(source.to_numpy())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    source, target = odd(1), odd(2).cuda()
    a, b = FlatParameters(source), FlatParameters(target)
    b.load_numpy(a.to_numpy())
    assert b.parameters.is_cuda
    assert checksum(b.to_numpy()) == checksum(a.to_numpy())
    target(inputs(0).cuda()).sum().backward()
    assert b.gradients.abs().sum() > 0
