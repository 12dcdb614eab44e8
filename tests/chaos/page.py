"""Writes the page that says what came of all cases."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

Verdict = dict[str, Any]
"""What came of one case."""
AIMS = {"actor": 5.0, "replay": 10.0, "learner": 15.0}
"""Seconds within which 95 of 100 deaths are to be repaired."""
HEAD = """# Chaos

`make chaos` (`tests/chaos/matrix.py`) kills and stops processes of runs, at random moments and at failpoints, as each
seed says. A checker compares the replay with what every environment wrote down: an acknowledged transition that is
missing, there twice or made up fails a case, and so do counters that go back, deaths without an event, a run that does
not end, and processes or shared memory left behind.
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
            "Seconds from a death to the next life at work, on two cores that other programs used too:",
            "",
            "| role | deaths | median | 95 of 100 | most | aim for 95 of 100 |",
            "|---|---|---|---|---|---|",
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
    """Return a row for each kind of role."""
    repairs = defaultdict(list)
    for found in results:
        for role, seconds in found.get("repairs", {}).items():
            repairs[role] += seconds
    return [
        f"| {role} | {len(s)} | {np.median(s):.2f} | {np.percentile(s, 95):.2f} | {max(s):.2f} | {AIMS.get(role, '')} |"
        for role, s in sorted(repairs.items())
    ]


def total(results: list[Verdict], what: str) -> int:
    """Return the sum of a count; cases that failed may have none."""
    return sum(found.get(what, 0) for found in results)
