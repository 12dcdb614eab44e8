"""A program of its own that forks ranks on this machine and times their sums, copies, computing and split networks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from qfleet.control.parallel_samples import quiet
from qfleet.control.parallel_tiny import update_seconds
from qfleet.parallel.gradsync import GradientGroup

SIZES = (1 << 12, 1 << 18, 1 << 22, 1 << 23)
"""Bytes of the tensors that are summed and gathered."""
CALLS = (41, 41, 11, 7)
"""How often each of them is timed; the fastest quarter ends at what counts."""
BETWEEN_S = 5e-4
"""Ranks compute for so long before each call, as they do in a run: whoever comes first waits, and has to be woken."""
COMPUTING_S = 0.4
"""How long ranks compute beside each other."""
TIMEOUT_S = 60.0


def main(directory: str, ranks: str) -> None:
    """Fork the ranks, and write what the first one found as JSON to the standard output."""
    count, children = int(ranks), []
    for rank in range(1, count):
        child = os.fork()
        if child == 0:
            _run(rank, count, Path(directory))
            os._exit(0)
        children.append(child)
    found = _run(0, count, Path(directory))
    for child in children:
        os.waitpid(child, 0)
    json.dump(found, sys.stdout)


def _run(rank: int, ranks: int, directory: Path) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of a quiet quarter by number of ranks, for each size; of interest from rank 0 only."""
    torch.set_num_threads(1)
    everyone = GradientGroup(rank, ranks, f"file://{directory}/all", TIMEOUT_S)
    found: dict[str, dict[str, list[float]]] = {"reduce": {}, "gather": {}, "compute": {}}
    for count in sorted({2, ranks}):
        if rank < count:
            group = GradientGroup(rank, count, f"file://{directory}/{count}", TIMEOUT_S)
            found["reduce"][str(count)] = _timed(group.all_reduce_)
            found["gather"][str(count)] = _timed(group.all_gather)
            group.close()
        everyone.all_reduce_(torch.zeros(1))  # those who have no part wait without computing
    for count in sorted({1, 2, ranks}):
        if rank < count:
            found["compute"][str(count)] = [_computing()]
        everyone.all_reduce_(torch.zeros(1))
    if rank < 2:
        spent = update_seconds(rank, lambda name: f"file://{directory}/{name}", TIMEOUT_S)
        found["tiny"] = {name: [quiet(seconds)] for name, seconds in spent.items()}
    everyone.all_reduce_(torch.zeros(1))
    everyone.close()
    return found


def _timed(collective: Callable[[torch.Tensor], object]) -> list[float]:
    found = []
    for size, calls in zip(SIZES, CALLS, strict=True):
        tensor, spent = torch.zeros(size // 4), []
        for _ in range(calls):
            _spin(BETWEEN_S)
            began = time.perf_counter()
            collective(tensor)
            spent.append(time.perf_counter() - began)
        found.append(quiet(spent))
    return found


def _computing() -> float:
    """Return the seconds of work like an update's: a convolution, a dense layer, and a pass over all weights."""
    image, kernel = torch.ones(8, 16, 40, 40), torch.ones(32, 16, 4, 4)
    rows, matrix, weights = torch.ones(32, 1024), torch.ones(1024, 512), torch.ones(1 << 20)
    spent: list[float] = []
    began = time.perf_counter()
    while (now := time.perf_counter()) < began + COMPUTING_S:
        torch.nn.functional.conv2d(image, kernel, stride=2)
        torch.mm(rows, matrix)
        weights.mul_(0.999)
        spent.append(time.perf_counter() - now)
    return quiet(spent)


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
