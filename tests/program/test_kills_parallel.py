"""Any process of a run with several learners is killed, also while it sends or sums: nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from killer import Killer
from test_kills import experiment, survive

import qfleet.api as api
import qfleet.session
from qfleet.control.monitor import Callbacks
from qfleet.core.failpoints import VARIABLE
from qfleet.program import place
from qfleet.runtime import checkpoint

ROLES = ("actor-0", "actor-1", "replay-0", "replay-1", "learner-0", "learner-1", "evaluator-0")
TWO = {"learners": 2, "replay.shards": 2}
POINTS = [
    # one learner has got its part of a draw, the other has not
    "replay-0/channel.after_send:kill@21,actor-0/channel.after_send:kill@50",
    # a part is written and not sent; a rank is inside a sum
    "replay-1/channel.after_write:kill@22,learner-1/group.sum:kill@30,actor-1/channel.after_write:kill@50",
    "replay-0/replay.before_commit:kill@40,replay-1/replay.after_commit:kill@45,learner-0/group.sum:kill@40",
    "replay-0/channel.before_send:kill@22,replay-1/channel.after_send:kill@23,learner-0/channel.before_ack:kill@20",
    "worker.step:kill@70",
]


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


@pytest.mark.parametrize(
    ("points", "shards"),
    [
        (POINTS[1], 2),
        pytest.param(POINTS[0], 1, marks=pytest.mark.slow),
        *(pytest.param(points, 2, marks=pytest.mark.slow) for points in (POINTS[0], *POINTS[2:])),
    ],
)
def test_nothing_is_lost_by_deaths_beside_two_learners(
    points: str, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, points)
    run = experiment(tmp_path, 1500, **{**TWO, "replay.shards": shards})
    found, deaths = survive(run, tmp_path, monkeypatch)
    died = {f"{death['role']}-{death['index']}" for death in deaths}
    assert {point.split("/")[0] for point in points.split(",") if "/" in point} <= died
    assert "/" in points or {"replay-0", "learner-0", "actor-0"} <= died
    assert found.sent > 1200
    assert found.stored == found.sent


@pytest.mark.parametrize(
    ("times", "deaths"), [("", 1), pytest.param(":always", 5, marks=pytest.mark.slow)], ids=["once", "again and again"]
)
def test_a_worker_that_dies_before_it_acknowledges_a_batch_stays_in_step(
    times: str, deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would send the batch's gradient a second time, in the next round; after four of these all would wait."""
    monkeypatch.setenv(VARIABLE, f"worker-1/channel.before_ack:kill@28{times}")
    servers = {"learners": 2, "parallel.update": {"kind": "server", "servers": 2, "mode": "sync"}}
    run = experiment(tmp_path, 1500, **servers)
    found, died = survive(run, tmp_path, monkeypatch)
    assert [death["role"] for death in died].count("worker") >= deaths
    assert found.stored == found.sent
    last = checkpoint.complete(tmp_path / "run" / "checkpoints")[-1]
    workers = [checkpoint.read_state(last, f"worker-{index}")["link"] for index in range(2)]
    assert workers[0]["marks"][0] == workers[1]["marks"][0] == workers[0]["origin"][2] == workers[1]["origin"][2]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"parallel.after_death": "fewer", "learners": 3}])
@pytest.mark.parametrize("capacity", [50_000, 2000])
def test_scores_of_kills_beside_several_learners(
    changes: dict[str, Any], capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(kills=20, seed=capacity + len(changes), pause=800, roles=ROLES)
    run = experiment(tmp_path, 30_000, **{**TWO, "replay.capacity": capacity, **changes})
    found, deaths = survive(run, tmp_path, monkeypatch, killer)
    assert killer.left == 0
    assert {death["role"] for death in deaths} == {"actor", "replay", "learner", "evaluator"}
    assert found.stored > 0.8 * min(capacity, found.sent)


class Assassin:
    """Kills named roles, each when the run has come a number of steps."""

    def __init__(self, **at: int) -> None:
        self._at = {name.replace("_", "-"): steps for name, steps in at.items()}
        self.placement: Any = None

    def on_step(self, metrics: dict[str, Any], stop: Any) -> None:
        for name, steps in list(self._at.items()):
            if metrics["env_steps"] >= steps and name in self.placement.pids():
                os.kill(self.placement.pids()[name], signal.SIGKILL)
                del self._at[name]

    def placed(self, *arguments: Any) -> Any:
        self.placement = place(*arguments)
        return self.placement


@pytest.mark.parametrize("kind", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_group_goes_on_with_fewer_until_one_is_left_and_is_whole_again_when_resumed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if kind == "ray":
        request.getfixturevalue("ray_session")
    assassin = Assassin(learner_0=500, learner_1=1100)
    monkeypatch.setattr(qfleet.session, "place", assassin.placed)
    fewer = {"placement": kind, "learners": 3, "parallel.after_death": "fewer", "checkpoint.every": 800}
    run = experiment(tmp_path, 1800, **fewer)
    done = api.train(run, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=assassin.on_step))
    told = [event["text"] for event in events_of(tmp_path, "notice") if event["kind"] == "fewer"]
    assert [text.rpartition(": ")[2] for text in told] == [
        "its group goes on with 2 of 3, without learner-2",
        "its group goes on with 1 of 3, without learner-1",
    ]
    assert told[0].startswith("learner-0 died (its process was killed by SIGKILL)")
    restarted = [event["text"] for event in events_of(tmp_path, "notice") if event["kind"] == "restarted"]
    assert [text.split("; ")[1] for text in restarted] == ["epoch 1, 2 ranks", "epoch 2, 1 rank"]
    lost = sum(int(text.split(": ")[1].split()[0]) for text in restarted)
    owed = (done.summary["env_steps"] - 200) / 8
    assert owed - lost - 20 <= done.summary["updates"] <= owed + 1, "a few draws were cut for those who left"
    further = api.resume(done.dir, env_steps=2400)
    made = further.summary["updates"] - done.summary["updates"]
    assert made == pytest.approx((further.summary["env_steps"] - done.summary["env_steps"]) / 8, abs=6)
    last = json.loads((done.dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert {f"learner.{rank}.busy" for rank in range(3)} <= set(last)
    assert last["skipped_updates"] == 0
