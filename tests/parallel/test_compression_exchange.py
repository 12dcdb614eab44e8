"""Compressed sums over real groups: the same bits on all ranks, bytes counted, and gradients that are not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_cases import KINDS, LOSSY, compressor, flat_layers, nature, normal, on_ranks, small_mlp
from torch import Tensor

from qfleet.parallel.compression.exchange import CompressedSum
from qfleet.parallel.compression.feedback import ErrorFeedback
from qfleet.parallel.gradsync import GradientGroup

SIZE, LAYERS = flat_layers(small_mlp())
UPDATES = 5


def gradient(rank: int, update: int) -> Tensor:
    return normal(SIZE, seed=100 * rank + update)


def hook(kind: str, group: GradientGroup, **options: Any) -> CompressedSum:
    return CompressedSum(compressor(kind, SIZE, LAYERS, seed=group.rank, **options), group)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_have_the_same_bits_and_owe_what_they_lack(kind: str, size: int, tmp_path: Path) -> None:
    options = {"momentum": 0.0, "fraction": 0.05, "warmup": 3} if kind == "topk" else {}

    def summed(group: GradientGroup) -> tuple[list[Tensor], Tensor]:
        sender = compressor(kind, SIZE, LAYERS, seed=group.rank, **options)
        replace = CompressedSum(sender, group)
        results = [replace(gradient(group.rank, update)) for update in range(UPDATES)]
        return results, sender.residual if isinstance(sender, ErrorFeedback) else torch.zeros(SIZE)

    ranks = on_ranks(size, tmp_path, summed)
    for results, _ in ranks:
        assert all(torch.equal(own, other) for own, other in zip(results, ranks[0][0], strict=True))
    total = torch.stack(ranks[0][0]).sum(0)
    owed = torch.stack([residual for _, residual in ranks]).sum(0)
    expected = torch.stack([gradient(rank, update) for rank in range(size) for update in range(UPDATES)]).sum(0)
    # three ranks sum two-byte floats as they are, whose rounding nobody owes
    rounding = {"fp16": 2.0**-10, "bf16": 2.0**-7}.get(kind, 0.0) * 16 if size > 2 else 0.0
    torch.testing.assert_close(total + owed, expected, rtol=0, atol=5e-5 + rounding)
    assert (total - expected).norm() < expected.norm()


def test_without_compression_it_is_the_sum(tmp_path: Path) -> None:
    results = on_ranks(3, tmp_path, lambda group: hook("none", group)(gradient(group.rank, 0)))
    for result in results:
        torch.testing.assert_close(result, gradient(0, 0) + gradient(1, 0) + gradient(2, 0))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_a_spoiled_gradient_is_named_and_leaves_no_trace(kind: str, value: float, tmp_path: Path) -> None:
    def one_spoiled(group: GradientGroup) -> tuple[int | None, bool, bool, int | None, bool]:
        sender = compressor(kind, SIZE, LAYERS, seed=group.rank)
        replace = CompressedSum(sender, group)
        replace(gradient(group.rank, 0))
        before = sender.state_dict()
        spoiled = gradient(group.rank, 1)
        if group.rank == 1:
            spoiled[SIZE // 2] = value
        replace(spoiled)
        culprit, after = replace.culprit, sender.state_dict()
        names = [name for name in ("residual", "velocity") if name in before]
        same = all(torch.equal(before[name], after[name]) for name in names)
        if kind == "powersgd":
            same &= torch.equal(before["codec"]["right"], after["codec"]["right"])
        nan = bool(spoiled.isnan().all())
        later = replace(gradient(group.rank, 2))
        return culprit, nan, same, replace.culprit, bool(later.isfinite().all())

    assert on_ranks(2, tmp_path, one_spoiled) == [(1, True, True, None, True)] * 2


def test_the_first_of_several_culprits_is_named(tmp_path: Path) -> None:
    def spoiled(group: GradientGroup) -> int | None:
        replace = hook("sign", group)
        replace(gradient(group.rank, 0) * (math.nan if group.rank else 1.0))
        return replace.culprit

    assert on_ranks(3, tmp_path, spoiled) == [1, 1, 1]


@pytest.mark.parametrize(("kind", "fewer"), [("fp16", 1.99), ("int8", 3.9), ("sign", 30), ("topk", 250)])
def test_bytes_of_two_ranks_with_the_nature_network(kind: str, fewer: float, tmp_path: Path) -> None:
    size, layers = flat_layers(nature())
    options = {"warmup": 0} if kind == "topk" else {}

    def sent(group: GradientGroup) -> tuple[int, int]:
        replace = CompressedSum(compressor(kind, size, layers, **options), group)
        for update in range(2):
            replace(normal(size, update))
        return replace.bytes_sent, replace.bytes_plain

    for bytes_sent, bytes_plain in on_ranks(2, tmp_path, sent):
        assert bytes_plain == 2 * 4 * size
        assert bytes_plain / bytes_sent >= fewer


@pytest.mark.parametrize("kind", ["none", "int8", "powersgd"])
def test_what_is_counted_is_what_the_group_was_given(kind: str, tmp_path: Path) -> None:
    """Sums cost twice all but a rank's own share; what is gathered goes to each other rank."""

    class Watched(GradientGroup):
        given = 0.0

        def all_reduce_(self, tensor: Tensor) -> Tensor:
            self.given += tensor.numel() * tensor.element_size() * 2 * (self.size - 1) / self.size
            return super().all_reduce_(tensor)

        def all_gather(self, tensor: Tensor) -> list[Tensor]:
            self.given += tensor.numel() * tensor.element_size() * (self.size - 1)
            return super().all_gather(tensor)

    def counted(group: GradientGroup) -> tuple[int, float]:
        group.__class__, replace = Watched, hook(kind, group)
        replace(gradient(group.rank, 0))
        assert isinstance(group, Watched)
        return replace.bytes_sent, group.given

    for sent, given in on_ranks(3, tmp_path, counted):
        assert sent == pytest.approx(given, abs=2)


@pytest.mark.parametrize("kind", LOSSY)
def test_a_resumed_group_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    def cut_and_uncut(group: GradientGroup) -> bool:
        first, second = (compressor(kind, SIZE, LAYERS, seed=seed + group.rank) for seed in (0, 50))
        replace = CompressedSum(first, group)
        for update in range(2):
            replace(gradient(group.rank, update))
        second.load_state_dict(first.state_dict())
        uncut = [replace(gradient(group.rank, update)) for update in range(2, 5)]
        replace = CompressedSum(second, group)
        cut = [replace(gradient(group.rank, update)) for update in range(2, 5)]
        return all(torch.equal(own, other) for own, other in zip(cut, uncut, strict=True))

    assert on_ranks(2, tmp_path, cut_and_uncut) == [True, True]


def test_fp16_sums_of_large_values_over_many_ranks_stay_finite(tmp_path: Path) -> None:
    results = on_ranks(3, tmp_path, lambda group: hook("fp16", group)(torch.full((SIZE,), 60_000.0)))
    for result in results:
        assert result.isfinite().all()
        assert result[0] > 30_000
