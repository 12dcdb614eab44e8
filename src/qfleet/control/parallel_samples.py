"""Batches to time updates with, and what counts of the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from qfleet.control.measurements import Curve
from qfleet.core.spec import EnvSpec
from qfleet.core.tensors import TensorBatch

FEWEST, MOST = 5, 1000
"""Calls of anything that is timed."""


def call_seconds(work: Callable[[], object], budget_s: float, device: torch.device) -> list[float]:
    """Return the seconds of each call of a piece of work, of which there are a few at least, after a warm-up."""
    spent: list[float] = []
    work()
    while len(spent) < FEWEST or (sum(spent) < budget_s and len(spent) < MOST):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - began)
    return spent


def sample(spec: EnvSpec, rows: int, device: torch.device) -> TensorBatch:
    """Return so many transitions with empty observations [B, ...]."""
    leaves = {
        name: torch.zeros(rows, *leaf.shape, dtype=getattr(torch, leaf.dtype), device=device)
        for name, leaf in spec.observations.items()
    }
    ones, action = torch.ones(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    mask = torch.ones(rows, spec.actions, dtype=torch.bool, device=device) if spec.masked else None
    return TensorBatch(leaves, action, ones, ones, leaves, ones, mask, mask, rows)


def quiet(seconds: Sequence[float]) -> float:
    """Return the seconds that three quarters of the calls exceed: other programs only ever add to them."""
    return statistics.quantiles(seconds, n=4)[0]


def rising(points: Sequence[tuple[int, float]]) -> Curve:
    """Return a curve, sizes rising, that never falls: what fewer rows seem to take above that is other programs'."""
    return tuple((rows, min(seconds for _, seconds in points[number:])) for number, (rows, _) in enumerate(points))
