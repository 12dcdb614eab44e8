"""PowerSGD beside torch's own, on matrices that it can hold exactly, and on slices of a vector."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compression_cases import codec, compressor, decoded, flat_layers, normal, on_ranks, small_mlp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from qfleet.parallel.compression.exchange import CompressedSum
from qfleet.parallel.compression.feedback import ErrorFeedback
from qfleet.parallel.compression.powersgd import Matrix, PowerSgdCodec
from qfleet.parallel.gradsync import GradientGroup

SHAPES = [(20, 30), (7,), (16, 4, 3, 3), (2, 3)]
SIZE = sum(torch.Size(shape).numel() for shape in SHAPES)


@dataclass
class Bucket:
    """What torch's hook wants to know of a bucket of gradients."""

    flat: Tensor

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        pieces = self.flat.split([torch.Size(shape).numel() for shape in SHAPES])
        return [piece.view(shape) for piece, shape in zip(pieces, SHAPES, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class LoneGroup:
    """A process group without others or threads: with a real one, now and then a thread of it aborted afterwards."""

    def size(self) -> int:
        return 1

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([self.reduced])
        return future

    def all_reduce(self, tensor: Tensor, group: LoneGroup, async_op: bool) -> LoneGroup:
        self.reduced = tensor
        return self


@pytest.mark.parametrize("rank", [1, 3])
def test_same_as_torchs_own(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = LoneGroup()
    monkeypatch.setattr(distributed, "all_reduce", group.all_reduce)
    state = PowerSGDState(group, rank, start_powerSGD_iter=2, min_compression_rate=1)

    def theirs(seed: int) -> Tensor:
        flat = normal(SIZE, seed)
        powerSGD_hook(state, Bucket(flat)).wait()  # type: ignore[arg-type]
        return flat

    for seed in range(3):  # two plain ones come first
        theirs(seed)
    layers = [Matrix(0, 20, 30), Matrix(607, 16, 36), Matrix(1183, 2, 3)]
    ours = compressor("powersgd", SIZE, layers, rank=rank)
    ours.load_state_dict({"codec": {"right": state.q_memory_dict[0].clone()}, "residual": state.error_dict[0].clone()})
    for seed in range(3, 9):
        out = torch.zeros(SIZE)
        ours.codec.add(ours.encode(normal(SIZE, seed)), out)
        torch.testing.assert_close(out, theirs(seed), rtol=1e-4, atol=1e-4)
    assert isinstance(ours, ErrorFeedback)
    torch.testing.assert_close(ours.residual, state.error_dict[0], rtol=1e-4, atol=1e-4)


def test_matrices_of_its_rank_are_exact_and_all_else_always_is() -> None:
    layers = [Matrix(5, 20, 30), Matrix(610, 3, 3)]
    vector = normal(640)
    layers[0].of(vector).copy_(normal(40, 1).view(20, 2) @ normal(60, 2).view(2, 30))
    result = decoded(codec("powersgd", 640, layers, rank=2), vector)
    torch.testing.assert_close(result, vector, rtol=1e-4, atol=1e-5)
    assert torch.equal(result[:5], vector[:5])
    assert torch.equal(result[605:], vector[605:]), "a matrix too small to gain anything is plain"


def test_follows_a_matrix_to_its_best_approximation() -> None:
    vector, layer = normal(600), Matrix(0, 20, 30)
    u, s, v = torch.linalg.svd(layer.of(vector))
    best = (u[:, :2] * s[:2] @ v[:2]).view(-1)
    form = codec("powersgd", 600, [layer], rank=2)
    errors = [float((decoded(form, vector) - vector).norm()) for _ in range(150)]
    assert errors[0] > 1.02 * errors[-1]
    assert errors[-1] == pytest.approx(float((best - vector).norm()), rel=1e-4)


def test_recovers_from_a_gradient_of_zeros() -> None:
    form = codec("powersgd", 600, [Matrix(0, 20, 30)], rank=2)
    assert torch.equal(decoded(form, torch.zeros(600)), torch.zeros(600))
    errors = [float((decoded(form, normal(600)) - normal(600)).norm()) for _ in range(20)]
    assert errors[-1] < 0.95 * float(normal(600).norm())


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_groups_sum_of_that_rank_is_exact(ranks: int, tmp_path: Path) -> None:
    layer = Matrix(0, 20, 30)

    def gradient(rank: int) -> Tensor:
        return torch.outer(normal(20, rank), normal(30, 10 + rank)).view(-1)

    def summed(group: GradientGroup) -> Tensor:
        hook = CompressedSum(compressor("powersgd", 600, [layer], rank=ranks), group)
        return hook(gradient(group.rank))

    for result in on_ranks(ranks, tmp_path, summed):
        torch.testing.assert_close(result, sum(gradient(rank) for rank in range(ranks)), rtol=1e-3, atol=1e-3)


def test_layers_are_found_where_the_flat_vector_has_them() -> None:
    network = nn.Sequential(nn.Linear(3, 5), nn.Conv2d(2, 3, 3), nn.Linear(4, 2))
    size, layers = flat_layers(network)
    assert [(layer.rows, layer.columns) for layer in layers] == [(5, 3), (3, 18), (2, 4)]
    flat = torch.as_strided(next(network.parameters()).detach(), (size,), (1,), 0)
    for layer, part in zip(layers, (network[0], network[1], network[2]), strict=True):
        assert torch.equal(layer.of(flat), part.weight.detach().flatten(1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.integers(0, 200))
def test_rows_within_a_slice(first: int, second: int) -> None:
    start, stop = min(first, second), max(first, second)
    layer = Matrix(13, 9, 17)
    positions = torch.arange(200)
    whole = [row for row in layer.of(positions) if start <= row[0] and row[-1] < stop]
    part = layer.within(start, stop)
    assert part.rows == len(whole)
    if whole:
        assert torch.equal(part.of(positions[start:stop]), torch.stack(whole))


def test_slices_of_a_vector_are_compressed_by_themselves() -> None:
    size, layers = flat_layers(small_mlp())
    vector, cut = normal(size), size // 3
    for start, stop in ((0, cut), (cut, size)):
        form = codec("powersgd", stop - start, [layer.within(start, stop) for layer in layers], rank=1)
        assert isinstance(form, PowerSgdCodec)
        payload = form.encode(vector[start:stop])
        assert sum(map(len, payload)) < (stop - start) / 2
        assert decoded(form, vector[start:stop]).norm() > 0
