"""Values of the Nature network for an actor on one CPU core, in fp32, bf16 and int8, beside each other; prints a table.

    python benchmarks/int8_acting.py [--observations 1 4 16 64] [--rounds 15]

int8 is torch's own, in two forms: dense layers whose weights are int8 and whose inputs are rounded as they come
("dense"), and the whole network with ranges that were measured beforehand ("whole"), which an actor would have to
measure again whenever its weights change. What is timed takes turns, so that other work on the machine meets all alike;
the median of the rounds counts. `agrees` is the share of observations for which the greedy action is that of fp32, for
a network that was just made, whose values lie close together.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.ao import quantization

CHECKED = 512


def nature() -> nn.Sequential:
    """Return the layers of the Nature network for six actions, on frames that are floats already."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6),
    ).eval()  # fmt: skip


def whole(network: nn.Sequential, seen: Tensor) -> nn.Module:
    """Return the network with int8 weights and values all through, by the ranges of what was seen."""
    wrapped = nn.Sequential(quantization.QuantStub(), *network, quantization.DeQuantStub())
    pairs = [[str(i), str(i + 1)] for i, layer in enumerate(wrapped) if isinstance(layer, nn.ReLU) for i in [i - 1]]
    fused = quantization.fuse_modules(wrapped.eval(), pairs)
    fused.qconfig = quantization.get_default_qconfig("x86")
    prepared = quantization.prepare(fused)
    prepared(seen)
    return quantization.convert(prepared)


def forms(seen: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return ways to compute the same values; with channels last, as actors have them."""
    plain = nature().to(memory_format=torch.channels_last)
    half = nature().to(torch.bfloat16).to(memory_format=torch.channels_last)
    dense = quantization.quantize_dynamic(nature(), {nn.Linear}, dtype=torch.qint8)
    static = whole(nature(), seen)
    return {
        "fp32": lambda frames: plain(frames.contiguous(memory_format=torch.channels_last)),
        "bf16": lambda frames: half(frames.bfloat16().contiguous(memory_format=torch.channels_last)).float(),
        "int8, dense": dense,
        "int8, whole": static,
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observations", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    checked = torch.randint(0, 256, (CHECKED, 4, 84, 84), generator=generator) / 255.0
    ways = forms(checked)
    best = ways["fp32"](checked).argmax(1)
    print("| form | agrees | " + " | ".join(f"{n} observations, ms" for n in options.observations) + " |")
    print("|---" * (2 + len(options.observations)) + "|")
    times = {(name, n): [] for name in ways for n in options.observations}
    for _ in range(options.rounds):
        for n in options.observations:
            for name, way in ways.items():
                way(checked[:n])
                began, calls = time.perf_counter(), 0
                while (spent := time.perf_counter() - began) < 0.02:
                    way(checked[:n])
                    calls += 1
                times[name, n].append(1e3 * spent / calls)
    for name, way in ways.items():
        agrees = (way(checked).argmax(1) == best).float().mean().item()
        middle = [statistics.median(times[name, n]) for n in options.observations]
        base = [statistics.median(times["fp32", n]) for n in options.observations]
        cells = [f"{ms:.2f} ({fp32 / ms:.2f} times as fast)" for ms, fp32 in zip(middle, base, strict=True)]
        print(f"| {name} | {agrees:.0%} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
