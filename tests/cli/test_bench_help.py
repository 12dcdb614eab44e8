"""The help of `qfleet bench` says what each suite measures, and only flags that it heeds."""

from __future__ import annotations

from typing import get_args

import pytest
from commands import command

from qfleet.bench import edges, full, overlap, pipeline, pong, stragglers
from qfleet.bench.pace import Pace
from qfleet.cli.bench import SUITES, BenchOptions


def test_every_suite_is_listed_and_has_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"all", *SUITES} == set(get_args(BenchOptions.model_fields["suite"].annotation))
    whole = command(capsys, "bench", "--help").out
    for name, suite in SUITES.items():
        assert f"\n  {name} " in whole
        page = command(capsys, "bench", name, "--help").out
        assert page.startswith(f"usage: qfleet bench {name} ")
        assert suite.rows[0].split()[0] in page
        assert ("--peers " in page) == ("peers" in suite.flags)
        assert ("--seeds " in page) == (name == "solve")


def test_the_page_of_the_pipeline_lists_the_rows_that_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(100.0, 100, 400, {"actor": 1.0, "learner": 1.0}, {"actor": 0.0, "learner": 0.0})
    for name in ("frames_gb_per_s", "refresh_ms", "message_share"):
        monkeypatch.setattr(edges, name, lambda: 1.0)
    monkeypatch.setattr(overlap, "measure_pace", lambda *_: pace)
    monkeypatch.setattr(pong, "train", lambda *_: pace)
    monkeypatch.setattr(pong, "act", lambda *_: 1.0)
    monkeypatch.setattr(full, "planned", lambda *_: pace)
    monkeypatch.setattr(stragglers, "rates", lambda *_: (1.0, 1.0))
    made = [row.what for row in pipeline.measure()]
    said = [row for row in SUITES["pipeline"].rows if not row.startswith("on a GPU: ")]
    assert [row.split(",")[0] for row in made] == [row.split(",")[0] for row in said]
    assert all(row.startswith(text) for row, text in zip(made[4:], said[4:], strict=True))
