"""What the tests of compression share: one of each form, networks to compress, and groups of ranks in threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from qfleet.algo.flat import FlatParameters
from qfleet.parallel.compression.build import make_codec, make_compressor
from qfleet.parallel.compression.codec import Codec
from qfleet.parallel.compression.config import CompressionConfig
from qfleet.parallel.compression.feedback import Compressor
from qfleet.parallel.compression.powersgd import Matrix, matrices
from qfleet.parallel.gradsync import GradientGroup

LOSSY = ["fp16", "bf16", "int8", "sign", "topk", "powersgd"]
KINDS = ["none", *LOSSY]


def settings(kind: str, **options: Any) -> CompressionConfig:
    adapter: TypeAdapter[CompressionConfig] = TypeAdapter(CompressionConfig)
    return adapter.validate_python({"kind": kind, **options})


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=generator(seed))


def codec(kind: str, size: int, layers: list[Matrix] | None = None, **options: Any) -> Codec:
    return make_codec(settings(kind, **options), size, layers or [], generator())


def compressor(kind: str, size: int, layers: list[Matrix] | None = None, seed: int = 0, **options: Any) -> Compressor:
    return make_compressor(settings(kind, **options), size, layers or [], generator(seed))


def decoded(of: Codec, vector: Tensor) -> Tensor:
    out = torch.zeros_like(vector)
    of.add(of.encode(vector), out)
    return out


def flat_layers(network: nn.Module) -> tuple[int, list[Matrix]]:
    """Return the values and matrices of a network whose parameters lie in one vector."""
    size = FlatParameters(network).parameters.numel()
    return size, matrices(network.parameters())


def nature() -> nn.Module:
    convolutions = nn.Conv2d(4, 32, 8), nn.Conv2d(32, 64, 4), nn.Conv2d(64, 64, 3)
    return nn.Sequential(*convolutions, nn.Linear(3136, 512), nn.Linear(512, 6))


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 2))


def on_ranks(size: int, folder: Path, work: Callable[[GradientGroup], Any]) -> list[Any]:
    """Return what each rank of a real gloo group made of the work, each in a thread of its own."""

    def rank(number: int) -> Any:
        group = GradientGroup(number, size, f"file://{folder}/meet", 20.0)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))
