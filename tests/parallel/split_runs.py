"""Runs comparisons of split updates on ranks that are real processes, and says how close they must be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from split_role import WAIT_S, Comparing, Handles, Job, Settings

from qfleet.runtime.graph import Graph
from qfleet.runtime.processes import ProcessPlacement

Results = dict[str, list[dict[str, float]]]


def compare(size: int, jobs: Sequence[Job], folder: Path) -> Results:
    """Return what each rank found in each job."""
    graph = Graph()
    inlets: list[Any] = []
    for rank in range(size):
        outlet, inlet = graph.stream(f"results-{rank}", 1)
        inlets.append(inlet)
        graph.add(Comparing, Settings(rank, size, str(folder), tuple(jobs)), Handles(outlet))
    placement = ProcessPlacement(graph)
    try:
        until = time.monotonic() + 300
        while not placement.done:
            assert time.monotonic() < until, placement.reports()
            placement.advance()
        found = [placement.open(inlet).receive() for inlet in inlets]
    finally:
        placement.close()
    return {str(job): [ranks[str(job)] for ranks in found] for job in jobs}


def check(job: Job, results: Results) -> None:
    for found in results[str(job)]:
        match job.what:
            case "double":
                assert max(found.values()) < 1e-12, found
            case "skip":
                assert found == {"skipped": 1.0, "made": 0.0, "same": 1.0}
            case "memory":
                # Parameters and gradients of both networks, and Adam's two averages; rows do not divide evenly.
                assert 6 <= job.degrees.data * found["share"] < 6.3, found
                assert abs(found["beside"]) < 0.05, found
                # Online and target network for the next states, online network forth and back; padding is not sent.
                assert 3.99 < found["gathered"] <= 4, found
                assert found["notes"] == 0
            case "desert":
                assert found["seconds"] < WAIT_S / 2, "a rank that left is seen, not waited for"
            case _:
                assert max(found.values()) < 1e-5, found
