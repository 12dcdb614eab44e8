"""The chaos harness itself: seeds mean always the same, a hang is seen, and the page counts what was found."""

from __future__ import annotations

from pathlib import Path

import matrix
import pytest
from cases import KILLS, LOSS, LOSSES, PAUSES, POINTS, RUNS, case
from page import page, repairs

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
