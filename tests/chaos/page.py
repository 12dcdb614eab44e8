"""Counts what came of cases, and writes the page that says it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

Verdict = dict[str, Any]
"""What came of one case."""
AIMS = {"actor": 5.0, "replay": 10.0, "learner": 15.0, "rank": 10.0}
"""Seconds within which 95 of 100 deaths are to be repaired."""
HEAD = """# Chaos

`make chaos` (`tests/chaos/matrix.py`) kills and stops processes of runs, at random moments and at failpoints, as each
seed says; on Ray every other kill is Ray's own, and in some cases a quarter of the calls of actors' methods is lost
(`RAY_testing_rpc_failure`, whose draws Ray does not let us seed). A checker compares the replay with what every
environment wrote down: an acknowledged transition that is missing, there twice or made up fails a case, and so do
counters that go back, deaths without an event, a run that does not end, and processes or shared memory left behind.
"""


def page(results: list[Verdict]) -> str:
    """Return the whole page."""
    failed, seeds = sum(bool(found["failed"]) for found in results), [found["seed"] for found in results]
    whole = f"**{len(results)} cases, {total(results, 'deaths'):,} deaths, {failed} failed.**"
    return "\n".join(
        [
            HEAD,
            f"{whole} Seeds {min(seeds)} to {max(seeds)}.",
            "",
            "| run | cases | deaths | pauses | acknowledged transitions | failed |",
            "|---|---|---|---|---|---|",
            *by_run(results),
            "",
            "Seconds from a death to the next life at work. A rank is one of several learners, which are begun anew"
            " together:",
            "",
            "| placement | role | repairs | median | 95 of 100 | most | aim for 95 of 100 |",
            "|---|---|---|---|---|---|---|",
            *by_role(results),
            "",
        ]
    )


def by_run(results: list[Verdict]) -> list[str]:
    """Return a row for each kind of run."""
    runs = defaultdict(list)
    for found in results:
        runs[found.get("run", "not known: it hung")].append(found)
    rows = []
    for name, cases in sorted(runs.items()):
        deaths, pauses, sent = (total(cases, what) for what in ("deaths", "paused", "sent"))
        failed = sum(bool(found["failed"]) for found in cases)
        rows.append(f"| {name} | {len(cases)} | {deaths} | {pauses} | {sent:,} | {failed} |")
    return rows


def by_role(results: list[Verdict]) -> list[str]:
    """Return a row for each kind of role in each placement."""
    repairs = defaultdict(list)
    for found in results:
        for role, seconds in found.get("repairs", {}).items():
            repairs[found["placement"], role] += seconds
    return [
        f"| {placement} | {role} | {times(s)} | {aim(role, s)} |" for (placement, role), s in sorted(repairs.items())
    ]


def times(seconds: list[float]) -> str:
    """Return how many they are, their median, what 95 of 100 are within, and the most."""
    return f"{len(seconds)} | {np.median(seconds):.2f} | {np.percentile(seconds, 95):.2f} | {max(seconds):.2f}"


def aim(role: str, seconds: list[float]) -> str:
    """Return what was aimed for, and whether it was missed."""
    if role not in AIMS:
        return ""
    return f"{AIMS[role]:g}{'' if np.percentile(seconds, 95) <= AIMS[role] else ', missed'}"


def repairs(deaths: list[dict[str, Any]], learners: int) -> dict[str, list[float]]:
    """Return the seconds from each death to the next life at work, by role; one of several learners is a rank."""
    seconds = defaultdict(list)
    for death in deaths:
        role = "rank" if death["role"] == "learner" and learners > 1 else death["role"]
        seconds[role].append(round(death["seconds_to_repair"], 3))
    return seconds


def total(results: list[Verdict], what: str) -> int:
    """Return the sum of a count; cases that failed may have none."""
    return sum(found.get(what, 0) for found in results)
