"""The chaos harness itself: seeds mean always the same, a hang is seen, and the page counts what was found."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import apart
import clocks
import matrix
import numpy as np
import pytest
from cases import (
    CLOCK,
    CUTS_S,
    FULL,
    FURTHER,
    FURTHER_RUNS,
    HANGS,
    KILLS,
    LOSS,
    LOSSES,
    PARTED,
    PAUSES,
    POINTS,
    RUNS,
    case,
)
from page import KILLING, page, repairs
from telling import check_told
from versions import Note, Version, check_versions, read

from qfleet.core.failpoints import parse

ALL = range(4 * len(RUNS))
GOOD = {
    "seed": 1,
    "run": "a",
    "placement": "ray",
    "faults": "kills",
    "deaths": 3,
    "paused": 1,
    "sent": 70,
    "repairs": {"actor": [0.5, 1.5], "rank": [20.0]},
}


def test_a_seed_is_always_the_same_case_and_any_stretch_of_them_has_every_run_and_fault():
    assert [case(seed) for seed in ALL] == [case(seed) for seed in ALL]
    on_ray = {what.run for what in map(case, ALL) if what.on_ray}
    assert {(what.run, what.faults) for what in map(case, ALL)} == {
        *((run, faults) for run in RUNS for faults in (KILLS, PAUSES, POINTS)),
        *((run, LOSS) for run in on_ray),
    }
    for what in map(case, ALL):
        assert bool(parse(what.points)) == (what.faults == POINTS) == (what.kills == 0)
        assert ("RAY_testing_rpc_failure" in what.environment) == (what.faults == LOSS)


def test_a_quarter_of_the_calls_are_lost_on_ray():
    (lost,) = LOSSES.values()
    assert sum(lost[f"{how}_failure_prob"] for how in ("req", "resp", "in_flight")) == 25


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("run", ["ray", "ray, two nodes"])
def test_nothing_is_lost_or_doubled_when_a_quarter_of_the_calls_are_lost(run: str) -> None:
    pytest.importorskip("ray")
    seed = next(what.seed for what in map(case, ALL) if (what.run, what.faults) == (run, LOSS))
    (found,) = matrix.run([seed])
    assert found["failed"] == ""
    assert found["deaths"] > 0
    assert found["stored"] == found["sent"] > 500


def test_a_case_that_hangs_is_ended_and_named_and_those_after_it_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "case.py"
    fake.write_text(
        "import json, sys, time\n"
        "for seed in map(int, sys.argv[1:]):\n"
        "    time.sleep(3600 if seed == 2 else 0)\n"
        "    print(json.dumps({'seed': seed, 'failed': ''}), flush=True)\n"
    )
    monkeypatch.setattr(matrix, "__file__", str(tmp_path / "matrix.py"))
    monkeypatch.setattr(matrix, "DEADLINE_S", 2.0)
    found = list(matrix.run([1, 2, 3]))
    assert [(one["seed"], bool(one["failed"])) for one in found] == [(1, False), (2, True), (3, False)]


def test_the_page_counts_cases_deaths_and_failures():
    text = page([{**GOOD, "failed": ""}, {**GOOD, "seed": 9, "failed": "lost: 1"}])
    assert "**2 cases, 6 deaths, 1 failed.** Seeds 1 to 9." in text
    assert "| a | 2 | 6 | 2 | 140 | 1 |" in text
    assert "| ray | actor | 4 | 1.00 | 1.50 | 1.50 | 5 |" in text
    assert "| ray | rank | 2 | 20.00 | 20.00 | 20.00 | 10, missed |" in text


def test_a_learner_among_others_is_a_rank_when_repairs_are_counted():
    deaths = [{"role": role, "seconds_to_repair": 1.0} for role in ("learner", "actor", "learner")]
    assert repairs(deaths, learners=1) == {"learner": [1.0, 1.0], "actor": [1.0]}
    assert repairs(deaths, learners=2) == {"rank": [1.0, 1.0], "actor": [1.0]}


def test_further_faults_take_turns_and_leave_the_seeds_before_them_alone():
    assert KILLING == FURTHER
    turns = [case(FURTHER + number) for number in range(5 * len(FURTHER_RUNS))]
    assert turns == [case(what.seed) for what in turns]
    assert {(what.faults, what.run) for what in turns} == {(f, run) for f, runs in FURTHER_RUNS.items() for run in runs}
    for what in turns:
        assert what.apart == (what.faults in CUTS_S) == (what.cut_s > 0)
        assert bool(what.hang_at) == (what.faults == HANGS)
        assert bool(what.kills) == (what.faults == CLOCK)
        parse(what.points)


def history(*notes: tuple[str, str, int, int]) -> list[Note]:
    """Notes in the order of time: life, what, epoch and number."""
    return [Note(at, life, what, Version(*version)) for at, (life, what, *version) in enumerate(notes)]


GOOD_HISTORY = (
    ("learner-0.0.9", "published", 0, 1),
    ("actor-0.0.8", "taken", 0, 1),
    ("learner-0.0.9", "published", 0, 5),
    ("learner-0.1.7", "published", 1, 3),
    ("actor-0.0.8", "taken", 1, 3),
    ("actor-0.1.6", "taken", 1, 3),
)


def test_weights_that_go_forward_are_counted():
    assert check_versions(history(*GOOD_HISTORY)) == {Version(0, 1), Version(0, 5), Version(1, 3)}
    begun = ("actor-0.0.8", "taken", 0, 0)  # with what a checkpoint has
    assert len(check_versions(history(begun, *GOOD_HISTORY), earlier={Version(0, 0)})) == 3
    with pytest.raises(AssertionError, match="nobody published"):
        check_versions(history(begun, *GOOD_HISTORY))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("learner-0.1.7", "published", 1, 3), "went back"),
        (("learner-0.1.7", "published", 0, 9), "written by"),
        (("learner-0.0.9", "published", 1, 4), "written by"),
        (("actor-0.0.8", "taken", 0, 5), "went back"),
        (("actor-0.0.8", "taken", 1, 4), "nobody published"),
    ],
)
def test_weights_that_go_back_have_two_writers_or_were_never_published_are_found(wrong, said):
    with pytest.raises(AssertionError, match=said):
        check_versions(history(*GOOD_HISTORY, wrong))


def test_what_roles_note_is_read_in_order_and_half_a_line_of_the_dead_is_left_out(tmp_path):
    from qfleet.core import history

    history.note("published", 0, 1)  # nobody wants to know
    history.begin(str(tmp_path), "learner-0", 2)
    history.note("published", 3, 4)
    (tmp_path / "actor-0.0.5").write_text("5 taken 3 4\n6 taken 3")
    history.begin("", "learner-0", 2)
    history.note("published", 5, 6)
    first, second = read(tmp_path)
    assert (first.life, first.version) == ("actor-0.0.5", Version(3, 4))
    assert second.life.startswith("learner-0.2.")
    assert (second.what, second.version) == ("published", Version(3, 4))


def test_a_fault_that_is_not_told_is_found():
    full = next(what for what in map(case, range(FURTHER, FURTHER + 20)) if what.faults == FULL)
    unsaved, saved = {"event": "notice", "kind": "unsaved"}, {"event": "notice", "kind": "saved", "text": "after 1.5 s"}
    assert check_told(full, [unsaved, saved]) == 1
    for events in ([], [unsaved], [unsaved, {**saved, "text": "soon"}]):
        with pytest.raises(AssertionError):
            check_told(full, events)
    with pytest.raises(AssertionError, match="without a cause"):
        check_told(full, [{"event": "restart", "cause": "", "seconds_to_repair": 1.0}])


def test_the_page_has_a_row_for_each_further_fault():
    further = {**GOOD, "seed": FURTHER, "run": "b", "faults": "full disk", "met": 2, "versions": 1234, "failed": ""}
    text = page([{**GOOD, "failed": ""}, further, {**further, "seed": FURTHER + 9, "run": "c"}])
    assert "**1 cases, 3 deaths, 0 failed.** Seeds 1 to 1." in text
    assert "**2 cases, 0 failed.** Seeds 10000 to 10009." in text
    assert "| full disk | b; c | 2 | 4 | 6 | 140 | 2,468 | 0 |" in text


@pytest.mark.skipif(bool(clocks.why_not()), reason=clocks.why_not())
def test_wall_clocks_jump_and_monotonic_ones_do_not(tmp_path):
    known = clocks.environment(tmp_path)
    script = "import time; print(time.time(), time.monotonic())"
    for seed in range(2):
        clocks.jump(Path(known[clocks.FILE]), np.random.default_rng(seed))
        before = time.time(), time.monotonic()
        said = subprocess.run([sys.executable, "-c", script], env=os.environ | known, stdout=subprocess.PIPE, text=True)
        wall, monotonic = map(float, said.stdout.split())
        assert 60 < abs(wall - before[0]) < 3600 * clocks.HOURS + 60
        assert abs(monotonic - before[1]) < 60


@pytest.mark.slow
@pytest.mark.skipif(bool(clocks.why_not()), reason=clocks.why_not())
def test_nothing_is_lost_when_clocks_jump_and_roles_are_killed():
    (found,) = matrix.run([next(what.seed for what in map(case, range(FURTHER, FURTHER + 20)) if what.faults == CLOCK)])
    assert found["failed"] == ""
    assert found["met"] > 0


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.skipif(bool(apart.why_not()), reason=apart.why_not())
@pytest.mark.parametrize("faults", CUTS_S)
def test_nothing_acknowledged_is_lost_or_doubled_when_the_network_breaks(faults: str) -> None:
    pytest.importorskip("ray")
    (found,) = matrix.run(
        [next(what.seed for what in map(case, range(FURTHER, FURTHER + 20)) if what.faults == faults)]
    )
    assert found["failed"] == ""
    assert faults == PARTED or found["stored"] == found["sent"]
