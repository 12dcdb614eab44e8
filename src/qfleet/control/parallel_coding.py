"""Measures what each compressed form of a gradient costs on this machine: its bytes, writing it and reading it."""

from __future__ import annotations

from functools import partial

import torch

from qfleet.control.parallel_layers import Timed
from qfleet.control.parallel_parts import Compression
from qfleet.control.parallel_samples import call_seconds, quiet
from qfleet.parallel.compression.build import make_compressor
from qfleet.parallel.compression.codec import payload_bytes
from qfleet.parallel.compression.config import (
    Bf16Config,
    CompressionConfig,
    Fp16Config,
    Int8Config,
    SignConfig,
    TopKConfig,
)

FORMS: tuple[CompressionConfig, ...] = (
    Fp16Config(),
    Bf16Config(),
    Int8Config(),
    SignConfig(),
    TopKConfig(warmup=0),
)
"""Those whose cost depends on nothing but the number of values; a warm-up is soon over."""
CODING_S = 0.05
"""How long each of the two directions is timed."""


def measure_compressions(values: int, device: str, timed: Timed | None = None) -> tuple[Compression, ...]:
    """Return what sending gradients of so many values costs in each form."""
    timed = timed or partial(call_seconds, device=torch.device(device))
    return tuple(_measured(config, values, device, timed) for config in FORMS)


def _measured(config: CompressionConfig, values: int, device: str, timed: Timed) -> Compression:
    generator = torch.Generator(device).manual_seed(0)
    compressor = make_compressor(config, values, [], generator)
    gradient = torch.randn(values, generator=generator, device=device)
    total, payload = torch.zeros_like(gradient), compressor.encode(gradient)
    return Compression(
        name=config.kind,
        value_bytes=payload_bytes(payload) / values,
        encode=quiet(timed(lambda: compressor.encode(gradient), CODING_S)) / values,
        decode=quiet(timed(lambda: compressor.codec.add(payload, total), CODING_S)) / values,
        gathered=True,
    )
