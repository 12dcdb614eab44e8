"""Updates a second of a Nature network with two threads, alone and two at once, by how long threads spin; a table.

python benchmarks/spinning.py [--seconds 5]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

WAYS = {
    "as the library has it": {},
    **{f"GOMP_SPINCOUNT={rounds}": {"GOMP_SPINCOUNT": rounds} for rounds in ("0", "1000", "10000", "100000")},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}


def updates_per_s(seconds: float) -> float:
    """Return the updates a second of one process."""
    import torch
    from torch import nn

    torch.set_num_threads(2)
    convolutions = [
        nn.Conv2d(4, 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
    ]
    network = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6))
    optimizer, frames = torch.optim.Adam(network.parameters(), fused=True), torch.rand(32, 4, 84, 84)
    made, began = -5, time.perf_counter()
    while made < 0 or time.perf_counter() - began < seconds:
        with torch.no_grad():
            target = network(frames).amax(1)
        optimizer.zero_grad()
        (network(frames)[:, 0] - target).square().mean().backward()
        optimizer.step()
        made += 1
        if made == 0:
            began = time.perf_counter()
    return made / (time.perf_counter() - began)


def together(number: int, seconds: float, way: dict[str, str]) -> str:
    """Return the updates a second of each of several processes that run at the same time."""
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    words = [sys.executable, __file__, "--seconds", str(seconds), "--one"]
    started = [subprocess.Popen(words, env={**plain, **way}, stdout=subprocess.PIPE, text=True) for _ in range(number)]
    return ", ".join(process.communicate()[0].strip() for process in started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(f"{updates_per_s(options.seconds):.1f}")
        return
    print("| threads that wait | alone | two at once |\n|---|---|---|")
    for name, way in WAYS.items():
        print(f"| {name} | {together(1, options.seconds, way)} | {together(2, options.seconds, way)} |", flush=True)


if __name__ == "__main__":
    main()
