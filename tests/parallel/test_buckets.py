"""Gradients that are summed in pieces during the backward pass."""

from __future__ import annotations

import pytest
import torch
from rank_threads import BUILDING, as_ranks
from torch import Tensor, nn

from qfleet.algo.flat import FlatParameters
from qfleet.parallel.buckets import BucketedSum
from qfleet.parallel.gradsync import GradientGroup


def network() -> nn.Module:
    with BUILDING:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3, bias=False))


def loss_of(module: nn.Module, rank: int, pass_number: int) -> Tensor:
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * pass_number + rank))
    return module(inputs).square().mean()


def expected(size: int, pass_number: int) -> Tensor:
    module = network()
    flat = FlatParameters(module)
    for rank in range(size):
        loss_of(module, rank, pass_number).backward()
    return flat.gradients.clone()


class Watched:
    """A group that remembers how many numbers each sum had."""

    def __init__(self, group: GradientGroup) -> None:
        self._group, self.sizes = group, []

    def begin_all_reduce(self, tensor):
        self.sizes.append(tensor.numel())
        return self._group.begin_all_reduce(tensor)

    def all_reduce_(self, tensor):
        return self._group.all_reduce_(tensor)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 2000, 1 << 20])
def test_pieces_have_the_sums_of_the_whole(size, bucket_bytes):
    def work(group):
        module = network()
        flat, hook, sums = FlatParameters(module), BucketedSum(group), []
        hook.attach(module, flat.gradients, bucket_bytes)
        for pass_number in range(3):
            flat.zero_grad()
            loss_of(module, group.rank, pass_number).backward()
            hook(flat.gradients)
            sums.append(flat.gradients.clone())
        return sums

    results = as_ranks(size, work)
    for pass_number in range(3):
        for sums in results:
            torch.testing.assert_close(sums[pass_number], expected(size, pass_number), rtol=1e-5, atol=1e-6)
            assert torch.equal(sums[pass_number], results[0][pass_number]), "the same bits on every rank"


def test_all_pieces_but_that_of_the_first_layer_are_begun_before_the_backward_pass_is_over():
    def work(group):
        module, watched = network(), Watched(group)
        flat, hook = FlatParameters(module), BucketedSum(watched)
        hook.attach(module, flat.gradients, bucket_bytes=1)
        loss_of(module, group.rank, 0).backward()
        during = list(watched.sizes)
        hook(flat.gradients)
        return during, watched.sizes, flat.gradients.numel()

    for during, sizes, whole in as_ranks(2, work):
        assert (len(during), len(sizes)) == (4, 5)
        assert sum(sizes) == whole


def test_gradients_that_autograd_did_not_make_are_summed_too():
    def work(group):
        module = network()
        flat, hook = FlatParameters(module), BucketedSum(group)
        hook.attach(module, flat.gradients, bucket_bytes=2000)
        flat.gradients.fill_(group.rank + 1.0)
        hook(flat.gradients)
        return flat.gradients

    for summed in as_ranks(2, work):
        assert (summed == 3.0).all()


def test_a_loss_that_is_told_after_the_backward_pass_reaches_every_rank():
    def work(group):
        module = network()
        flat, hook = FlatParameters(module), BucketedSum(group)
        hook.attach(module, flat.gradients, bucket_bytes=1)
        loss_of(module, group.rank, 0).backward()
        if group.rank == 1:
            flat.gradients[:1].add_(torch.tensor(float("nan")), alpha=0)
        hook(flat.gradients)
        return bool(flat.gradients.norm().isfinite())

    assert as_ranks(2, work) == [False, False]


def test_values_that_should_be_the_same_are_checked_and_the_odd_rank_is_named():
    def work(group):
        group.require_same(7, "the weights")
        try:
            group.require_same(7 + (group.rank == 2), "the weights after update 5")
        except Exception as error:
            return str(error)

    for text in as_ranks(3, work):
        assert "the weights after update 5 of rank 2 differ from those of rank 0" in text
