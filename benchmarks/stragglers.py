"""What one slow environment costs an actor, by the number of groups in which it acts for them; prints a table.

python benchmarks/stragglers.py [SECONDS]
"""

from __future__ import annotations

import sys

import torch

from qfleet.bench.stragglers import rates


def main() -> None:
    torch.set_num_threads(1)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 8.0
    print("| actor.groups | steps/s | with one slow environment | ratio |\n|---|---|---|---|")
    for groups in (1, 2, 4, 8):
        healthy, slowed = rates(seconds, groups)
        print(f"| {groups} | {healthy:,.0f} | {slowed:,.0f} | {slowed / healthy:.2f} |")


if __name__ == "__main__":
    main()
