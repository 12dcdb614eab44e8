"""Builds the codec of a compression's settings, and the compressor around it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qfleet.parallel.compression.blocks import Int8Codec
from qfleet.parallel.compression.codec import Codec
from qfleet.parallel.compression.config import (
    Bf16Config,
    CompressionConfig,
    Fp16Config,
    Int8Config,
    NoCompressionConfig,
    PowerSgdConfig,
    SignConfig,
    TopKConfig,
)
from qfleet.parallel.compression.feedback import Compressor, ErrorFeedback, MomentumCorrection
from qfleet.parallel.compression.floats import HalfCodec, PlainCodec
from qfleet.parallel.compression.powersgd import Matrix, PowerSgdCodec
from qfleet.parallel.compression.signs import SignCodec
from qfleet.parallel.compression.topk import TopKCodec


def make_codec(config: CompressionConfig, size: int, layers: Sequence[Matrix], generator: torch.Generator) -> Codec:
    """Return what writes and reads vectors of `size` values on the generator's device."""
    device = generator.device
    match config:
        case NoCompressionConfig():
            return PlainCodec()
        case Fp16Config():
            return HalfCodec(torch.float16)
        case Bf16Config():
            return HalfCodec(torch.bfloat16)
        case Int8Config():
            return Int8Codec(size, device, generator)
        case SignConfig():
            return SignCodec(layers, size, device)
        case TopKConfig():
            return TopKCodec(config, size, device)
        case PowerSgdConfig():
            return PowerSgdCodec(config.rank, layers, size, device)


def make_compressor(
    config: CompressionConfig, size: int, layers: Sequence[Matrix], generator: torch.Generator
) -> Compressor:
    """Return what compresses the gradients of one rank, whose own generator it takes; it keeps what is not sent."""
    device = generator.device
    match config:
        case NoCompressionConfig():
            return Compressor(PlainCodec())
        case TopKConfig():
            return MomentumCorrection(TopKCodec(config, size, device), config.momentum, size, device)
        case _:
            return ErrorFeedback(make_codec(config, size, layers, generator), size, device)
