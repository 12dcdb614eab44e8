"""Work, links and clusters that do not exist, for tests of what is predicted for them."""

from __future__ import annotations

import math
from typing import Any

from qfleet.control.parallel_parts import Layer, Link, Site, Work, cluster_fabric
from qfleet.control.simulator_cluster import Cluster

MS = 1e-3
LINK = Link(bandwidth=1e9, latency=1e-4)
NO_LINK = Link(bandwidth=1e30, latency=0.0)


def layer(name: str = "dense", seconds: float = MS, units: int = 64, **changes: Any) -> Layer:
    """Return a layer whose backward pass takes twice its forward pass, each in step with the rows (at 32)."""
    values = {
        "name": name,
        "parameters": 1000,
        "inputs": 100,
        "outputs": 50,
        "units": units,
        "flops": 1e5,
        "forward": ((8, seconds / 4), (32, seconds)),
        "backward": ((8, seconds / 2), (32, 2 * seconds)),
    }
    return Layer(**{**values, **changes})


def work(layers: tuple[Layer, ...] | None = None, **changes: Any) -> Work:
    """Return an update of 32 rows in 10 ms, in step with the rows, of four equal layers."""
    values: dict[str, Any] = {
        "batch": 32,
        "update": ((8, 2.5 * MS), (32, 10 * MS)),
        "layers": layers if layers is not None else tuple(layer(f"layer-{i}", 0.5 * MS) for i in range(4)),
        "rest": ((8, 0.0), (32, 0.0)),
        "step": 0.0,
        "passes": 1,
        "moments": 2,
    }
    return Work(**{**values, **changes})


def site(link: Link = NO_LINK, ranks: int = 4, cores: float = math.inf, memory: int = 2**40) -> Site:
    """Return a place where ranks do not slow each other down unless cores are short."""
    return Site(cluster_fabric(link), memory, ranks, cores)


def cluster(**changes: Any) -> Cluster:
    """Return a small cluster without any variation, limited by nothing in particular."""
    values: dict[str, Any] = {
        "actors": 8,
        "rows": 64,
        "message": 0.05,
        "served": 0.0,
        "shards": 2,
        "store": 1e-6,
        "learners": 4,
        "batch": 128,
        "compute": 0.01,
        "step": 0.0,
        "mode": "all_reduce",
        "collective": "ring",
        "servers": 2,
        "steps_per_update": 64.0,
        "publish_period": 1,
        "parameters": 1000,
        "value_bytes": 4.0,
        "row_bytes": 100,
        "batch_bytes": 12_800,
        "link": Link(bandwidth=1e12, latency=0.0),
        "fanout": 4,
        "spread": 0.0,
    }
    return Cluster(**{**values, **changes})
