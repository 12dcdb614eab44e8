"""The placement `processes`: what its edges cost, what it gains over inline, and Pong beside Stable-Baselines3."""

from __future__ import annotations

from pathlib import Path

from qfleet.bench import edges, overlap, pong
from qfleet.bench.table import Row


def measure(peers: Path | None = None) -> list[Row]:
    """Measure all three; `peers` is the environment of Stable-Baselines3."""
    return [*edges.measure(), *overlap.measure(), *pong.measure(peers)]
