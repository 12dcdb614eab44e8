"""Times each compressed form of a gradient on one core, and counts its bytes: the Nature network, 1.7M values.

    python benchmarks/compression_micro.py [--json FILE]

Each figure is the best of several rounds in CPU time, so that other load counts little. Encoding includes error
feedback; decoding is what a parameter server does with one payload, or a rank with each other rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import build_network
from qfleet.algo.torsos import NatureConfig
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.parallel.compression.build import make_compressor
from qfleet.parallel.compression.codec import payload_bytes
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
from qfleet.parallel.compression.powersgd import matrices

ATARI = EnvSpec(name="Atari", observations={PLAIN: LeafSpec(shape=(4, 84, 84), dtype="uint8")}, actions=6)
ROUNDS = 15
FORMS: list[CompressionConfig] = [
    NoCompressionConfig(),
    Fp16Config(),
    Bf16Config(),
    Int8Config(),
    SignConfig(),
    TopKConfig(warmup=0),
    PowerSgdConfig(),
]


def best_ms(work: Callable[[], object]) -> float:
    """Milliseconds of CPU time of the best of several calls."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times) * 1e3


def measure(config: CompressionConfig) -> dict[str, float | str]:
    """Bytes and times of one form."""
    network = build_network(NatureConfig(), ReplayAgent(), ATARI, seed=0)
    flat = FlatParameters(network)
    size = flat.gradients.numel()
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-3
    generator = torch.Generator().manual_seed(1)
    compressor = make_compressor(config, size, matrices(network.parameters()), generator)
    payload, out = compressor.encode(gradient), torch.zeros(size)
    return {
        "kind": config.kind,
        "values": size,
        "bytes": payload_bytes(payload),
        "ratio": 4 * size / payload_bytes(payload),
        "encode_ms": best_ms(lambda: compressor.encode(gradient)),
        "decode_ms": best_ms(lambda: compressor.codec.add(payload, out)),
    }


def main() -> None:
    """Print a table, and write the figures to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(config) for config in FORMS]
    print(f"{rows[0]['values']:,} values\n| form | bytes | fewer | encode ms | decode ms |\n|---|---|---|---|---|")
    for row in rows:
        times = f"{row['encode_ms']:.2f} | {row['decode_ms']:.2f}"
        print(f"| {row['kind']} | {row['bytes']:,} | {row['ratio']:.2f}x | {times} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
