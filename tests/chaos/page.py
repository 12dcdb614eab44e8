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
seed says; on Ray every fourth kill is that of a steward, and so of all roles of its node, and in some cases a quarter
of the calls of actors' methods is lost (`RAY_testing_rpc_failure`, whose draws Ray does not let us seed). A checker
compares the replay with what every environment wrote down: an acknowledged transition that is missing, there twice or
made up fails a case, and so do counters that go back, deaths without an event, a run that does not end, and processes
or shared memory left behind.
"""
FURTHER_HEAD = """## Further faults

Seeds from 10,000 on stand for other faults. Besides the above, a case fails when weights go back, an epoch of them has
two writers, somebody takes weights that were not published, something is drawn that is no item of the replay, or a
fault that the run can notice is not in the event log with its cause and the time to its repair.

- late messages: each of a dozen messages between roles is held up for half a second, before, in or after its sending;
- full disk, slow disk: two writes of checkpoints, metrics or events fail, or some take half a second more each;
- clock jumps and kills: the wall clocks of all processes, each by itself, jump forward and back by up to 12 hours
  again and again (`tests/chaos/wall_clock.c`; monotonic clocks go on), while processes are killed;
- damaged file: a bit of a file of the newest checkpoint flips between the end of a run and its resume;
- NaN: the network's values are no numbers in some passes of the learner; hanging environments: one of each actor hangs;
- lost packets, short and long partition: the actors are on another machine (a network namespace), and the network to it
  loses 30 of 100 packets, or all, for 5 to 15 s, 2 to 5 s and 25 to 35 s. Ray gives a node up after about 10 s here: a
  fixed run has to end then, and is resumed when the machine is back, an elastic one has to go on with actors on the
  machine that is left. With a machine goes what it had sent and nobody had acknowledged.

Of late messages and slow disks the faults that were planned are counted; a short run does not come to all of them.
"""
KILLING = 10_000
"""Seeds below this are of the cases that kill."""


def page(results: list[Verdict]) -> str:
    """Return the whole page."""
    killing = [found for found in results if found["seed"] < KILLING]
    further = [found for found in results if found["seed"] >= KILLING]
    failed, seeds = sum(bool(found["failed"]) for found in killing), [found["seed"] for found in killing]
    whole = f"**{len(killing)} cases, {total(killing, 'deaths'):,} deaths, {failed} failed.**"
    return "\n".join(
        [
            HEAD,
            f"{whole} Seeds {min(seeds)} to {max(seeds)}.",
            "",
            "| run | cases | deaths | pauses | acknowledged transitions | failed |",
            "|---|---|---|---|---|---|",
            *by_run(killing),
            "",
            "Seconds from a death to the next life at work. A rank is one of several learners, which are begun anew"
            " together:",
            "",
            "| placement | role | repairs | median | 95 of 100 | most | aim for 95 of 100 |",
            "|---|---|---|---|---|---|---|",
            *by_role(killing),
            "",
            *(further_section(further) if further else []),
        ]
    )


def further_section(results: list[Verdict]) -> list[str]:
    """Return the lines on further faults."""
    failed, seeds = sum(bool(found["failed"]) for found in results), [found["seed"] for found in results]
    return [
        FURTHER_HEAD,
        f"**{len(results)} cases, {failed} failed.** Seeds {min(seeds)} to {max(seeds)}.",
        "",
        "| fault | runs | cases | faults | deaths | acknowledged transitions | weights published | failed |",
        "|---|---|---|---|---|---|---|---|",
        *by_fault(results),
        "",
    ]


def by_fault(results: list[Verdict]) -> list[str]:
    """Return a row for each kind of fault."""
    faults = defaultdict(list)
    for found in results:
        faults[found.get("faults", "not known: it hung")].append(found)
    rows = []
    for name, cases in sorted(faults.items()):
        runs = "; ".join(sorted({found["run"] for found in cases if "run" in found}))
        counts = " | ".join(f"{total(cases, what):,}" for what in ("met", "deaths", "sent", "versions"))
        rows.append(f"| {name} | {runs} | {len(cases)} | {counts} | {sum(bool(found['failed']) for found in cases)} |")
    return rows


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
