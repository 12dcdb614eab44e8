"""How long gradients and weights travel: the usual alpha-beta formulas of collectives and of parameter servers."""

from __future__ import annotations

import math
import statistics

from qfleet.control.parallel_parts import VALUE, Compression, Link


def ring_seconds(link: Link, ranks: int, size: float) -> float:
    """Return the seconds of a sum of `size` bytes over a ring: 2 (N - 1) steps, an Nth of the bytes in each."""
    steps = 2 * (ranks - 1)
    return steps * link.seconds(size / ranks) if ranks > 1 else 0.0


def tree_seconds(link: Link, ranks: int, size: float) -> float:
    """Return the seconds of a sum of `size` bytes up a binary tree and down again, all of it in every step."""
    return 2 * math.ceil(math.log2(ranks)) * link.seconds(size) if ranks > 1 else 0.0


def gather_seconds(link: Link, ranks: int, size: float) -> float:
    """Return the seconds in which every rank gets the `size` bytes of every other."""
    return (ranks - 1) * link.seconds(size)


def exchange_seconds(reduce: Link, gather: Link, ranks: int, values: int, how: Compression) -> tuple[float, float]:
    """Return the seconds of a sum of so many values on the wire, and of one rank's encoding and decoding."""
    if ranks == 1:
        return 0.0, 0.0
    payloads = ranks if how.gathered else 1
    coding = values * (how.encode + payloads * how.decode)
    size = values * how.value_bytes
    return (gather_seconds(gather, ranks, size) if how.gathered else ring_seconds(reduce, ranks, size)), coding


def server_seconds(link: Link, workers: int, servers: int, values: int, how: Compression) -> tuple[float, float]:
    """Return the seconds in which one worker pushes and pulls, and those that a server's link is busy for all of them.

    Every server has a slice of the values; a worker talks to all of them at once over its own link.
    """
    size = values * (how.value_bytes + VALUE)
    own = 2 * link.latency + size / link.bandwidth
    return own, workers * size / servers / link.bandwidth


def slowest(ranks: int) -> float:
    """Return how far the slowest of so many ranks is behind the mean, in standard deviations (Blom's formula)."""
    return statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
