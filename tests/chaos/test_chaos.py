"""The chaos harness itself: seeds mean always the same, a hang is seen, and the page counts what was found."""

from __future__ import annotations

from pathlib import Path

import matrix
import pytest
from cases import KILLS, PAUSES, POINTS, RUNS, case
from page import page

from qfleet.core.failpoints import parse

ALL = range(4 * len(RUNS))
GOOD = {
    "seed": 1,
    "run": "a",
    "faults": "kills",
    "deaths": 3,
    "paused": 1,
    "sent": 70,
    "repairs": {"actor": [0.5, 1.5]},
}


def test_a_seed_is_always_the_same_case_and_any_stretch_of_them_has_every_run_and_fault():
    assert [case(seed) for seed in ALL] == [case(seed) for seed in ALL]
    assert {(case(seed).run, case(seed).faults) for seed in ALL} == {
        (r, f) for r in RUNS for f in (KILLS, PAUSES, POINTS)
    }
    for what in map(case, ALL):
        assert bool(parse(what.points)) == (what.faults == POINTS) == (what.kills == 0)


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
    assert "| actor | 4 | 1.00 | 1.50 | 1.50 | 5.0 |" in text
