"""The placement `processes`: its edges, what it gains over inline, a slow environment, and Pong on this machine."""

from __future__ import annotations

from pathlib import Path

from qfleet.bench import edges, full, overlap, pong, stragglers
from qfleet.bench.table import Row


def measure(peers: Path | None = None) -> list[Row]:
    """Measure all of them; `peers` is the environment of Stable-Baselines3."""
    return [*edges.measure(), *overlap.measure(), *stragglers.measure(), *full.measure(), *pong.measure(peers)]
