"""A rank of a learner group dies: the group is formed anew from the first rank's last state, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from program_cases import short

import qfleet.api as api
import qfleet.session
from qfleet.control.monitor import Callbacks
from qfleet.core.failpoints import VARIABLE
from qfleet.program import place

SETTINGS: dict[str, Any] = {
    "placement": "processes",
    "learners": 3,
    "network.hidden": [16],
    "learner.snapshot_s": 0.05,
    "learner.train_period": 4.0,
    "checkpoint.every": 10**9,
    "evaluation.every": 10**9,
    "evaluation.target": None,
}


def events_of(run: api.Run, kind: str) -> list[dict[str, Any]]:
    lines = (run.dir / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


class RankKiller:
    """Kills a rank when the run has come a number of steps."""

    def __init__(self, name: str, at: int) -> None:
        self._name, self._at, self.placement = name, at, None

    def on_step(self, metrics: dict[str, Any], stop: Any) -> None:
        if self._at and metrics["env_steps"] >= self._at:
            os.kill(self.placement.pids()[self._name], signal.SIGKILL)
            self._at = 0

    def placed(self, *arguments: Any) -> Any:
        self.placement = place(*arguments)
        return self.placement


@pytest.mark.parametrize(
    ("rank", "changes"),
    [
        (0, {}),
        pytest.param(2, {"parallel.compression": {"kind": "int8"}}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(1, {"parallel.update": {"kind": "sharded"}}, marks=pytest.mark.slow),
        pytest.param(1, {"learners": 1, "parallel.tensor": 2}, marks=pytest.mark.slow),
        pytest.param(0, {"learners": 1, "parallel.pipeline": 2, "network.hidden": [16, 16]}, marks=pytest.mark.slow),
    ],
)
def test_a_group_is_formed_anew_when_a_rank_dies(rank, changes, tmp_path, monkeypatch):
    killer = RankKiller(f"learner-{rank}", at=1500)
    monkeypatch.setattr(qfleet.session, "place", killer.placed)
    experiment = short(env_steps=4000, **{**SETTINGS, **changes})
    ranks = set(range(experiment.ranks))
    run = api.train(experiment, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=killer.on_step))
    assert run.summary["env_steps"] >= 4000
    died = events_of(run, "restart")
    assert {(event["role"], event["index"]) for event in died} == {("learner", other) for other in ranks}
    causes = {event["index"]: event["cause"] for event in died}
    assert "SIGKILL" in causes[rank]
    for other in ranks - {rank}:
        assert f"learner-{rank} of its group died" in causes[other] or "another rank may be gone" in causes[other]
    told = [event["text"] for event in events_of(run, "notice") if event["kind"] == "restarted"]
    assert len(told) == 1, "one rank speaks for the group"
    owed = (run.summary["env_steps"] - experiment.learner.learning_starts) / 4
    lost = int(told[0].split(": ")[1].split()[0])
    assert owed - lost - 20 <= run.summary["updates"] <= owed + 1, "a few parts of draws are left out to be level again"


def test_a_rank_that_dies_inside_a_collective_does_not_hang_the_others(tmp_path, monkeypatch):
    """It dies when it has begun a sum and before that is complete: its peers are in it, or come to it."""
    monkeypatch.setenv(VARIABLE, "learner-1/group.sum:kill@60")
    run = api.train(short(env_steps=3000, **SETTINGS), run_dir=tmp_path / "run")
    assert run.summary["env_steps"] >= 3000
    assert {event["index"] for event in events_of(run, "restart")} == {0, 1, 2}
