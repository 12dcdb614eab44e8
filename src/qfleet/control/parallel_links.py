"""Measures how fast ranks of this machine talk to each other, and how much they slow each other down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qfleet.control.measurements import Curve
from qfleet.control.parallel_parts import Fabric, Handling, Link
from qfleet.control.parallel_ranks import SIZES, TIMEOUT_S
from qfleet.control.parallel_tiny import handling_of
from qfleet.core.errors import QfleetError

RANKS = 4
"""Ranks that are tried beside each other, and two of them alone."""
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]);"
    " from qfleet.control.parallel_ranks import main; main(*sys.argv[2:])"
)
_SOONEST, _FASTEST = 1e-7, 1e12
"""No link is taken to have less latency in seconds, or more bytes a second."""


@dataclass(frozen=True)
class LocalRanks:
    """What there is to know about several ranks on this machine."""

    fabric: Fabric
    slowdown: Curve
    """How many times as long a rank computes for the same, by how many do so at once."""
    handling: Handling


def measure_links(ranks: int = RANKS) -> LocalRanks:
    """Return what sums, copies and computing of up to so many ranks cost here; takes some seconds, with gloo."""
    with tempfile.TemporaryDirectory(prefix="qfleet-ranks-") as directory:
        arguments = [sys.executable, "-c", _START, json.dumps(sys.path), directory, str(ranks)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        try:
            ended = subprocess.run(
                arguments, capture_output=True, text=True, env={**os.environ, **threads}, timeout=2 * TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise QfleetError(f"{ranks} ranks did not talk to each other within {error.timeout:.0f} s") from error
    if ended.returncode:
        raise QfleetError(f"{ranks} ranks could not be timed: {ended.stderr.strip().splitlines()[-1:]}")
    return local_ranks(json.loads(ended.stdout))


def local_ranks(found: dict[str, dict[str, list[float]]]) -> LocalRanks:
    """Return what the ranks' seconds, by number of ranks and size, mean."""
    reduce, gather = (
        tuple(
            (int(count), fit_link(SIZES, seconds, *shares(int(count), kind))) for count, seconds in found[kind].items()
        )
        for kind in ("reduce", "gather")
    )
    alone = found["compute"]["1"][0]
    slowdown = tuple((int(count), max(1.0, seconds[0] / alone)) for count, seconds in found["compute"].items())
    tiny = {name: seconds[0] for name, seconds in found["tiny"].items()}
    return LocalRanks(Fabric(reduce, gather), slowdown, handling_of(**tiny, link=reduce[0][1]))


def shares(ranks: int, kind: str) -> tuple[int, float]:
    """Return how many messages a collective sends one after the other, and which part of the bytes each has."""
    return (2 * (ranks - 1), 1 / ranks) if kind == "reduce" else (ranks - 1, 1.0)


def fit_link(sizes: Sequence[float], seconds: Sequence[float], messages: int, part: float) -> Link:
    """Return the link whose latency and bandwidth explain the seconds of collectives best, by relative error."""
    times = np.asarray(seconds)
    columns = np.stack([np.full(len(times), float(messages)), messages * part * np.asarray(sizes, np.float64)], axis=1)
    latency, cost = np.linalg.lstsq(columns / times[:, None], np.ones(len(times)), rcond=None)[0]
    if cost <= 0:
        cost = times[-1] / columns[-1, 1]
    return Link(bandwidth=min(_FASTEST, float(1 / cost)), latency=max(_SOONEST, float(latency)))
