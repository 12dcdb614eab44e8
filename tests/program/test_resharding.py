"""Replay shards are added and taken away while a run trains: each transition is stored once, and every change told."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from program_cases import short, stop_at
from test_kills import Killer, experiment, survive

import qfleet.api as api
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment
from qfleet.runtime import ownership

PARTS: dict[str, Any] = {"actors": 3, "elastic.max_shards": 3, "elastic.automatic": "off", "evaluation.every": 10**9}


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


class Operator(Killer):
    """Asks for so many shards when the run has come so many steps, and kills who it was told to once it has them."""

    def __init__(self, run: Path, *wishes: tuple[int, int, str]) -> None:
        super().__init__(kills=0, seed=0, pause=2)
        self.run, self.wishes, self.asked = run, list(wishes), 0
        self.present: list[list[int]] = []
        """The shards after each wish."""
        self.victim = ""

    def on_step(self, metrics: dict[str, Any], stop: Any) -> None:
        super().on_step(metrics, stop)
        if self.asked > len(self.present) and len(events_of(self.run, "scaled")) == self.asked:
            self.present.append(self.placement.present("replay"))
            if self.victim:
                os.kill(self.placement.pids()[self.victim], signal.SIGKILL)
        if self.wishes and metrics["env_steps"] >= self.wishes[0][0] and self.asked == len(self.present):
            _, shards, self.victim = self.wishes.pop(0)
            ownership.request_scale(self.run, shards=shards)
            self.asked += 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "BEAT_S", 0.02)


def changes_of(run: Path) -> list[tuple[str, int, int]]:
    return [(event["what"], event["before"], event["after"]) for event in events_of(run, "elastic")]


def test_nothing_is_lost_when_shards_come_and_go_and_one_dies(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = experiment(tmp_path, 3000, **PARTS), tmp_path / "run"
    operator = Operator(folder, (400, 2, ""), (1000, 3, "replay-2"), (1800, 1, "replay-0"))
    found, deaths = survive(run, tmp_path, monkeypatch, operator)
    assert operator.present == [[0, 1], [0, 1, 2], [0]]
    assert [(death["role"], death["index"]) for death in deaths] == [("replay", 2), ("replay", 0)]
    assert changes_of(folder) == [("shards", 1, 2), ("shards", 2, 3), ("shards", 3, 1)]
    assert all("asked for by " in event["text"] and event["seconds"] > 0 for event in events_of(folder, "elastic"))
    assert found.sent > 2700
    assert found.stored == found.sent
    updates = json.loads((folder / "summary.json").read_text())["updates"]
    assert updates == pytest.approx((3000 - 200) / 8, rel=0.03), "one limiter counts all inserts and samples"
