"""Breaks many runs, each as its seed says, and writes down what came of them.

    python tests/chaos/matrix.py [--kills 2000] [--first-seed 0] [--further 60] [--limit SECONDS]

Goes on until so many processes have been killed, then with so many cases of further faults (those that this machine can
make). Cases that the file of results has are not run again, so that a matrix that was cut goes on. A case that does not
end in time is a hang: it is ended, and told with its seed. `python tests/chaos/case.py SEED` repeats one.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import apart
import clocks
from cases import CLOCK, FURTHER, Case, case
from page import Verdict, page

FOLDER = Path(__file__).parents[2] / "benchmarks"
RESULTS, TABLE = FOLDER / "chaos.jsonl", FOLDER / "chaos.md"
DEADLINE_S = 900.0
"""The longest that a case may take; the slowest, with two machines, take 200 at a load of 25."""
BATCH = 8
"""Cases of one process: to start one takes as long as a short case."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--further", type=int, default=60, help="how many cases of further faults")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="begin no further cases after so many seconds"
    )
    options = parser.parse_args()
    until, seed = time.monotonic() + options.limit, options.first_seed
    known = read()
    while deaths(known) < options.kills and time.monotonic() < until:
        seeds = []
        while len(seeds) < BATCH:
            seeds += [seed] if seed not in known else []
            seed += 1
        run_all(seeds, known)
    further = [what for what in map(case, range(FURTHER, FURTHER + options.further)) if what.seed not in known]
    for what in further:
        if why := why_not(what):
            print(f"{what.seed:5d}  left out, {what.faults}: {why}", flush=True)
        elif time.monotonic() < until:
            run_all([what.seed], known)
    TABLE.write_text(page(list(known.values())))
    if bad := [found["seed"] for found in known.values() if found["failed"]]:
        sys.exit(f"failed: seeds {', '.join(map(str, bad))}; repeat one by: python tests/chaos/case.py SEED")


def run_all(seeds: list[int], known: dict[int, Verdict]) -> None:
    """Run cases, and write down what comes of each."""
    for found in run(seeds):
        known[found["seed"]] = found
        with RESULTS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(told(found), flush=True)


def why_not(what: Case) -> str:
    """Return what this machine lacks for a case, empty if nothing."""
    if what.apart:
        return apart.why_not()
    return clocks.why_not() if what.faults == CLOCK else ""


def read() -> dict[int, Verdict]:
    """Return what is known, by seed; a seed that was run again counts by its last run."""
    if not RESULTS.exists():
        return {}
    return {found["seed"]: found for found in map(json.loads, RESULTS.read_text().splitlines())}


def deaths(known: dict[int, Verdict]) -> int:
    """Return how many processes were killed in the cases that are there for that."""
    return sum(found.get("deaths", 0) for seed, found in known.items() if seed < FURTHER)


def run(seeds: list[int]) -> Iterator[Verdict]:
    """Run cases in a process of their own; one that hangs is ended, and the others go on in a new process."""
    done = 0
    while left := seeds[done:]:
        command = [sys.executable, str(Path(__file__).with_name("case.py")), *map(str, left)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        said = lines_of(process)
        for seed in left:
            line = next_of(said)
            done += 1
            yield json.loads(line) if line else {"seed": seed, "failed": "hang, or its process died"}
            if not line:
                break
        end(process, 10.0 if line else 0.0)


def lines_of(process: subprocess.Popen[str]) -> queue.Queue[str]:
    """Return where the lines that a process prints arrive, and an empty one when it has ended."""
    said: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(line)
        said.put("")

    threading.Thread(target=read, daemon=True).start()
    return said


def next_of(said: queue.Queue[str]) -> str:
    """Return the next line, or nothing when none comes in time."""
    try:
        return said.get(timeout=DEADLINE_S)
    except queue.Empty:
        return ""


def end(process: subprocess.Popen[str], seconds: float) -> None:
    """Wait so long for a process to end by itself, then end it and all of its session."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def told(found: Verdict) -> str:
    """Return a line about one case."""
    what = f"{found.get('run', '')}, {found.get('faults', '')}: {found.get('deaths', 0)} deaths"
    return f"{found['seed']:5d}  {found.get('seconds', DEADLINE_S):6.1f} s  {what}  {found['failed'] or 'good'}"


if __name__ == "__main__":
    main()
