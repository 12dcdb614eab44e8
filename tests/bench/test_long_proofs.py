"""The programs that cut and break runs for long: what they cut, and how they count."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


@pytest.fixture
def cut_points(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend("benchmarks")
    return importlib.import_module("cut_points")


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend("benchmarks")
    return importlib.import_module("soak")


def test_any_36_points_in_a_row_have_all_that_there_is_to_cut(cut_points):
    points = [cut_points.Point(number) for number in range(100, 136)]
    kinds = {(p.algorithm, p.environment, p.placement["placement"], p.killed) for p in points}
    assert len(kinds) == 3 * 3 * 2 * 2
    assert {p.step for p in points} == {cut_points.Point(p.number).step for p in points}
    assert all(p.step > cut_points.EVERY for p in points if p.killed)


def test_the_table_of_points_counts_those_that_differ(cut_points):
    one = {"algorithm": "pqn", "environment": "catch", "placement": "inline", "killed": False, "failed": ""}
    text = cut_points.table([one, {**one, "killed": True, "failed": "differ: model"}])
    assert "| pqn | catch | inline | 1 | 1 | 1 of 2 |" in text
    assert "**1 of 2**" in text


def test_a_soak_looks_at_memory_and_score_after_the_warm_up(soak):
    memory = [(second, 50.0 if second < 100 else 100.0 + second / 100, 6) for second in range(0, 300, 2)]
    run = {"minutes": 5.0, "memory": memory, "evaluations": [[50.0, 0.0], [150.0, 10.0], [290.0, 20.0]]}
    assert soak.growth(run) == pytest.approx((100 + 2.8) / (100 + 1.2) - 1, abs=2e-4)
    assert soak.score(run) == 15.0


def test_the_interval_is_that_of_one_further_score(soak):
    low, high = soak.interval([10.0, 12.0, 14.0])
    assert (low + high) / 2 == pytest.approx(12.0)
    assert high - low == pytest.approx(2 * 4.30 * 2.0 * (4 / 3) ** 0.5)
