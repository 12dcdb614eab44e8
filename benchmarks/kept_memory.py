"""Pong on CPU cores with memory that is kept when it is freed, and as the C library has it, in turns; prints a table.

    python benchmarks/kept_memory.py [--rounds 3] [--seconds 8]

Whoever has set malloc up keeps that: here by a variable that says what is so anyway.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

WAYS = {"kept": {}, "as the C library has it": {"MALLOC_TOP_PAD_": "131072"}}
ONE = """
import sys
from qfleet.bench import pong
pace = pong.train(int(sys.argv[1]), float(sys.argv[2]), "fp32")
print(pace.steps_per_s, pace.busy_s["learner"] / pace.updates)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    found: dict[tuple[str, int], list[list[float]]] = {(way, threads): [] for way in WAYS for threads in (1, 2)}
    for _ in range(options.rounds):
        for (way, threads), lines in found.items():
            words = [sys.executable, "-c", ONE, str(threads), str(options.seconds)]
            done = subprocess.run(words, env={**plain, **WAYS[way]}, capture_output=True, text=True, check=True)
            lines.append([float(number) for number in done.stdout.split()])
    print("| memory | learner's threads | steps/s | an update |\n|---|---|---|---|")
    for (way, threads), lines in found.items():
        steps, update = (statistics.median(column) for column in zip(*lines, strict=True))
        print(f"| {way} | {threads} | {steps:,.0f} | {1e3 * update:.1f} ms |")


if __name__ == "__main__":
    main()
