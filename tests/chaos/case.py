"""Runs cases by their seeds, breaks them as they say, and prints for each one line of JSON with what came of it.

    python tests/chaos/case.py SEED [SEED ...]

A case is good when `failed` is empty: the run came to its end by itself, the checker found every transition that was
acknowledged once and nothing else, counters never went back, weights went only forward, every fault is in the event log
with its cause and the time to its repair, and nothing is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "program"))

import itertools

import apart
import clocks
import numpy as np
import psutil
from breaking import Breaker
from cases import CLOCK, PARTED, Case, case
from history import check
from page import repairs
from stories import Ending, live_through
from telling import check_told
from test_kills import Patient, experiment, lives, stored
from versions import Version, check_versions, read

import qfleet.session
from qfleet.core.failpoints import VARIABLE
from qfleet.experiment import Experiment
from qfleet.program import place
from qfleet.replay import Replay
from qfleet.replay.samplers import PrioritisedSampler
from qfleet.runtime.memory import shared_memory_root
from ray_nodes import other_node

ROLES = ("actor-", "replay-", "learner-", "evaluator-", "inference-", "server-", "worker-", "ray::", "raylet", "gcs_")
ALONE = "QFLEET_CHAOS_ALONE"
"""Set in the process of one case."""
STALL_S = 3.0
"""How long an environment may take for a step: as long as a minute by the choice of a run."""
NOTICED_S = {"processes": 0.5, "ray": 5.0}
"""How long it takes until a death is noticed, by placement; Ray waits for calls that are lost."""
DRAWS, DRAWN = 20, 64
"""How often the replay of each shard is drawn from in the end, and how many items at a time."""
Lines = list[dict[str, Any]]


def main() -> None:
    for what in map(case, map(int, sys.argv[1:])):
        if (what.on_ray or what.faults == CLOCK) and ALONE not in os.environ:
            print(in_its_own_process(what), flush=True)
        else:
            print(json.dumps(verdict(what)), flush=True)


def in_its_own_process(what: Case) -> str:
    """Run a case in a process that has no Ray from the case before, or that has other clocks; returns its line."""
    command = [sys.executable, __file__, str(what.seed)]
    with tempfile.TemporaryDirectory() as folder:
        extra = clocks.environment(Path(folder)) if what.faults == CLOCK else {}
        environment = what.environment | extra | {ALONE: "1"}
        if what.apart:
            return apart.in_two_machines(what, command, environment)
        whole = os.environ | environment
        said = subprocess.run(command, env=whole, stdout=subprocess.PIPE, text=True, check=True).stdout
    return said.splitlines()[-1]  # Ray prints there that actors died


def verdict(what: Case) -> dict[str, Any]:
    """Run a case; return what was done to it, what it cost and, in `failed`, what went wrong."""
    began, breaker = time.monotonic(), Breaker(what, np.random.default_rng(what.seed))
    found: dict[str, Any] = {"seed": what.seed, "run": what.run, "faults": what.faults, "points": what.points}
    with contextlib.ExitStack() as stack:
        folder = os.environ.get(apart.FOLDER) or stack.enter_context(tempfile.TemporaryDirectory())
        try:
            found |= broken(what, Path(folder), breaker)
            found["failed"] = ""
        except BaseException as error:
            breaker.stop()
            found["failed"] = f"{type(error).__name__}: {error}"
            found["traceback"] = traceback.format_exc()
    return found | {"killed": breaker.killed, "paused": breaker.paused, "seconds": round(time.monotonic() - began, 1)}


def broken(what: Case, folder: Path, breaker: Breaker) -> dict[str, Any]:
    """Run a case to its end and check all that was promised."""
    kwargs = {"env.kwargs": {"journal": str(folder / "journal"), "hang_at": what.hang_at}}
    run = experiment(folder, what.env_steps, **what.settings, **kwargs)
    os.environ[VARIABLE] = what.points
    qfleet.session.place = watched(breaker, what)
    with cluster(what):
        breaker.start()
        ending = Ending()
        summary, played = live_through(what, run, folder, np.random.default_rng(what.seed), ending)
        breaker.stop()
    assert summary["env_steps"] >= run.env_steps
    nothing_left()
    events, metrics = (lines(folder / "run" / name) for name in ("events.jsonl", "metrics.jsonl"))
    check_counters(events, metrics)
    deaths = [event for event in events if event["event"] == "restart"]
    assert lives(deaths) >= len(breaker.killed) - unseen(breaker, run, ending), "a death is not in the event log"
    faults = breaker.jumps or check_told(what, events)
    shards = [stored(run, folder / "run", index) for index in range(run.replay_parts)]
    sound(shards)
    evicting, ticks = run.replay.capacity < run.env_steps, run.actor.unroll * run.actor.groups
    unsent, lost = 1 if ticks == 1 else ticks + 1, what.faults == PARTED
    history = check(shards, played, evicting, unsent, machine_lost=lost)
    return {
        "placement": run.placement,
        "deaths": lives(deaths),
        "met": faults,
        "sent": history.sent,
        "stored": history.stored,
        "versions": weights_published(folder),
        "repairs": repairs(deaths, run.learners),
    }


def weights_published(folder: Path) -> int:
    """Check the history of each part of a run; return how many weights they published."""
    parts: list[set[Version]] = []
    for notes in sorted(folder.glob("history-*")):
        parts.append(check_versions(read(notes), earlier=set().union(*parts)))
    return sum(map(len, parts))


def check_counters(events: Lines, metrics: Lines) -> None:
    """Raise AssertionError if the count of environment steps goes back, but for what a resume undoes."""
    resumes = [event["wall_s"] for event in events if event["event"] == "resumed"]
    steps = [line["env_steps"] for line in metrics]
    back = sum(after < before for before, after in itertools.pairwise(steps))
    assert back <= len(resumes), "the count of environment steps went back"


@contextlib.contextmanager
def cluster(what: Case) -> Iterator[None]:
    """Have two nodes of Ray where a case asks for them; a run that needs one starts it."""
    if what.nodes == 1:
        yield
        return
    from qfleet.runtime.ray_cluster import start_local, stop_local

    start_local()
    try:
        with other_node() as node:
            node.begin()
            yield
    finally:
        stop_local()


def watched(breaker: Breaker, what: Case) -> Any:
    """Return what makes placements as ever, shows them to the breaker, and lets roles die as often as they like."""

    def placed(*arguments: Any, **named: Any) -> Any:
        placement: Any = place(*arguments, **named)
        placement._restarts = Patient()
        if what.hang_at:
            placement._watchdog.stall = STALL_S
        breaker.placement = placement
        return placement

    return placed


def unseen(breaker: Breaker, run: Experiment, ending: Ending) -> int:
    """Return how many deaths need not be told one by one: a group of learners dies as one, and some leave for good.

    Nor is that of a process which has done its work, when the run is over before anybody looks.
    """
    over = ending.at - NOTICED_S[run.placement]
    names = [name for (name, _), at in zip(breaker.killed, breaker.times, strict=True) if at < over]
    late = len(breaker.killed) - len(names)
    return late + (sum(name.startswith("learner") for name in names) if run.learners > 1 else 0)


def nothing_left() -> None:
    """Raise AssertionError if processes or shared memory of the run are still there."""
    left = [child.name() for child in psutil.Process().children(recursive=True) if child.name().startswith(ROLES)]
    assert not left, f"processes left behind: {left}"
    folders = list(shared_memory_root().glob(f"qfleet-{os.getpid()}-*"))
    assert not folders, f"shared memory left behind: {folders}"


def sound(shards: list[Replay]) -> None:
    """Raise AssertionError unless items have priorities above 0, trees equal their leaves, and draws are of items."""
    for replay in shards:
        sampler = replay.sampler
        if isinstance(sampler, PrioritisedSampler):
            leaves = sampler.tree.leaves
            assert np.isclose(sampler.tree.total, leaves.sum()), "the tree is not the sum of its leaves"
            assert (leaves >= 0).all()
            assert np.count_nonzero(leaves) == sampler.count
        drawn = np.concatenate([replay.sample(DRAWN).index for _ in range(DRAWS)])
        assert np.isin(drawn, sampler.items()).all(), "something was drawn that is no item"


def lines(path: Path) -> Lines:
    """Return what a file of JSON lines has."""
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
