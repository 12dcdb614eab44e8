"""The benchmark command: what it refuses, and that its tables say what was measured. Nothing here is timed."""

from __future__ import annotations

import json

import pytest

from qfleet.bench import solve, start
from qfleet.bench.table import Row, markdown, plain
from qfleet.cli.main import main

ROWS = {"speed": [Row("batches", "40 /s", "10 /s (peer)", 4.0, "ratio 3", True), Row("bytes", "7 GB")]}


def test_a_table_shows_figure_peer_ratio_and_goal():
    text = markdown(ROWS, "qfleet bench all")
    assert "| batches | 40 /s | 10 /s (peer) | 4.00 | ratio 3 | yes |" in text
    assert "| bytes | 7 GB |  |  |  |  |" in text
    assert "torch" in text
    assert json.loads(json.dumps(plain(ROWS)))["suites"]["speed"][0]["ratio"] == 4.0


@pytest.mark.parametrize("words", [["everything"], ["solve", "--seeds", "0"], ["solve", "--peer", "x"], []])
def test_bad_requests_are_refused(words, capsys):
    assert main(["bench", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_peers_that_are_not_there_are_named_before_anything_is_measured(tmp_path, capsys):
    assert main(["bench", "solve", "--peers", str(tmp_path / "none")]) == 3
    assert "setup.sh" in capsys.readouterr().err


def test_a_seed_that_did_not_solve_counts_as_infinitely_slow(monkeypatch):
    results = iter(
        [{"seconds": s, "env_steps": 100, "solved": s is not None, "final_mean": 500} for s in (1.0, None, 3.0)]
    )
    monkeypatch.setattr(solve, "_ours", lambda seed: next(results))
    rows = solve.measure(None, [1, 2, 3])
    assert rows[0].ours == "3.00 s"
    assert rows[2].ours == "2 of 3"
    assert rows[2].met is False


def test_the_host_loop_leaves_nearly_all_the_time_to_the_roles():
    assert 0 < start._host_share() < 0.5
