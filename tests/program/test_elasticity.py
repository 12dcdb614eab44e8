"""Actors and learner ranks join and leave a run while it trains: nothing is lost, and every change is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from program_cases import short

import qfleet.api as api
import qfleet.session
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import ConfigError
from qfleet.core.protocols import Machine
from qfleet.program import place
from qfleet.runtime import checkpoint, ownership
from qfleet.runtime.processes import ProcessPlacement

SETTINGS: dict[str, Any] = {
    "placement": "processes",
    "network.hidden": [16],
    "elastic.max_actors": 3,
    "elastic.max_learners": 2,
    "elastic.automatic": "off",
    "checkpoint.every": 10**9,
    "evaluation.every": 10**9,
    "evaluation.target": None,
}


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


class Operator:
    """Asks for other numbers when the run has come so many steps, each time the answer to the last one is there.

    Ends the run when there is an event of the kind `until`.
    """

    def __init__(self, run: Path, *wishes: tuple[int, int | None, int | None], until: str = "") -> None:
        self.run, self.wishes, self.asked, self._until = run, list(wishes), 0, until
        self.placement: Any = None
        self.seen: list[tuple[list[int], list[int]]] = []

    def on_step(self, metrics: dict[str, Any], stop: Callable[[], None]) -> None:
        answers = len(events_of(self.run, "scaled"))
        if answers > len(self.seen):
            self.seen.append((self.placement.present("actor"), self.placement.present("learner")))
        if self.wishes and metrics["env_steps"] >= self.wishes[0][0] and answers == self.asked:
            _, actors, learners = self.wishes.pop(0)
            ownership.request_scale(self.run, actors, learners)
            self.asked += 1
        if self._until and events_of(self.run, self._until):
            stop()

    def placed(self, *arguments: Any) -> Any:
        self.placement = place(*arguments)
        return self.placement


@pytest.fixture
def operated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[api.Run, Operator]]:
    """Return a function that trains a short run under an operator."""
    monkeypatch.setattr(ownership, "BEAT_S", 0.02)

    def train(*wishes: tuple[int, int | None, int | None], until: str = "", **changes: Any) -> tuple[api.Run, Operator]:
        operator = Operator(tmp_path / "run", *wishes, until=until)
        monkeypatch.setattr(qfleet.session, "place", operator.placed)
        experiment = short(**{**SETTINGS, **changes})
        run = api.train(experiment, run_dir=operator.run, callbacks=Callbacks(on_step=operator.on_step))
        return run, operator

    return train


def changes_of(run: api.Run) -> list[tuple[str, int, int]]:
    return [(event["what"], event["before"], event["after"]) for event in events_of(run.dir, "elastic")]


def owed(run: api.Run, starts: int = 200, period: int = 4) -> float:
    return (run.summary["env_steps"] - starts) / period


@pytest.mark.parametrize("kind", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_actors_and_learners_join_and_leave_and_every_draw_is_learned_from_once(
    kind: str, operated: Any, request: pytest.FixtureRequest
) -> None:
    if kind == "ray":
        request.getfixturevalue("ray_session")
    run, operator = operated((500, 2, 2), (1800, 9, None), (1900, 1, 1), env_steps=8000, placement=kind)
    assert operator.seen == [([0, 1], [0, 1]), ([0, 1], [0, 1]), ([0], [0])]
    assert sorted(changes_of(run)) == [("actors", 1, 2), ("actors", 2, 1), ("learners", 1, 2), ("learners", 2, 1)]
    assert all("asked for by " in event["text"] for event in events_of(run.dir, "elastic"))
    answers = events_of(run.dir, "scaled")
    assert [answer["applied"] for answer in answers] == [True, False, True]
    assert "--elastic.max_actors 9" in answers[1]["text"]
    assert events_of(run.dir, "restart") == [], "nobody died"
    told = [event["text"] for event in events_of(run.dir, "notice") if event["kind"] in ("regrouped", "restarted")]
    assert [text.partition("; ")[2] for text in told] == ["epoch 1, 2 ranks", "epoch 2, 1 rank"]
    assert owed(run) - 1 < run.summary["updates"] <= owed(run) + 1, "nothing was lost, nothing doubled"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"elastic.max_actors": 1, "actors": 2}, "max_actors 1 is below the 2 actors"),
        ({"elastic.min_actors": 3, "actors": 2}, "min_actors 3 exceeds actors 2"),
        ({"placement": "inline"}, "max_actors 3 needs agent.kind 'replay' and placement 'processes' or 'ray'"),
        ({"lockstep": True}, "max_actors 3 needs .* without lockstep"),
        ({"elastic.max_learners": 64}, "max_learners 64 exceeds learner.batch_size 32"),
        ({"elastic.max_learners": 2, "learners": 3}, "max_learners 2 is below learners 3"),
        ({"parallel.compression": {"kind": "int8"}, "learners": 2, "elastic.max_learners": 3}, "no compression"),
        ({"optim.schedule": {"kind": "plateau"}}, "no optim.schedule.kind 'plateau'"),
        ({"elastic.max_actors": 0, "lockstep": True}, "max_learners 2 .* 'processes' or 'ray' without lockstep"),
        # Its ranks would see other statistics, and their weights differ soon after the group has grown.
        ({"network.input.scale": [], "network.input.normalize": True}, "network.input.normalize False"),
    ],
)
def test_what_could_not_grow_is_refused_before_anything_starts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        short(**{**SETTINGS, **changes})


@pytest.mark.slow
def test_a_run_is_resumed_with_those_who_were_there_and_who_was_away_can_come_back(
    operated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages must not be taken for ones that the replay has already."""
    run, operator = operated((500, 3, None), (1500, 1, None), env_steps=12_000, actors=2)
    assert operator.seen == [([0, 1, 2], [0]), ([0], [0])]
    operator.wishes, operator.asked, operator.seen = [(12_100, 3, 2)], 2, operator.seen[:2]
    further = api.resume(run.dir, env_steps=30_000, callbacks=Callbacks(on_step=operator.on_step))
    assert changes_of(further)[-2:] in ([("actors", 1, 3), ("learners", 1, 2)], [("learners", 1, 2), ("actors", 1, 3)])
    assert operator.seen[-1] == ([0, 1, 2], [0, 1])
    assert owed(further) - 6 < further.summary["updates"] <= owed(further) + 6, "a resumed limiter forgives"
    last = checkpoint.complete(run.dir / "checkpoints")[-1]
    replay = checkpoint.read_state(last, "replay-0")["replay"]
    assert replay["counts"]["duplicates"] == 0
    again = api.resume(run.dir, env_steps=30_600)
    record = json.loads((again.dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert {f"actor.{index}.busy" for index in range(3)} | {"learner.1.busy"} <= set(record), "they are all there again"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"replay.shards": 2, "actors": 2},
        {"inference": {"kind": "served"}, "actors": 2},
        {"replay.sampler": {"kind": "prioritised"}, "actors": 2},
    ],
    ids=["two shards", "served", "prioritised"],
)
def test_other_arrangements_grow_and_shrink_and_come_to_their_end(changes: dict[str, Any], operated: Any) -> None:
    run, operator = operated((500, 3, 2), (2000, 1, 1), (2500, 2, 2), env_steps=20_000, **changes)
    assert operator.seen == [([0, 1, 2], [0, 1]), ([0], [0]), ([0, 1], [0, 1])]
    assert events_of(run.dir, "restart") == []
    assert owed(run) - 3 < run.summary["updates"] <= owed(run) + 1


@pytest.mark.slow
def test_actors_are_added_by_themselves_where_they_hold_the_learner_up(
    operated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight = [Machine("here", "here", cores=8.0)]
    monkeypatch.setattr(ProcessPlacement, "machines", lambda placement: eight)
    monkeypatch.setattr(ProcessPlacement, "home", lambda placement, name: "here")
    acting = {"learner.train_period": 1024.0, "network.hidden": [512, 512], "actor.unroll": 8}
    automatic = {"elastic.automatic": "on", "elastic.settle_s": 1.0}
    run, _ = operated(until="elastic", env_steps=10_000_000, **acting, **automatic)
    added = [event for event in events_of(run.dir, "elastic") if event["what"] == "actors"]
    assert added
    assert all(event["after"] == event["before"] + 1 and "the learner waits" in event["text"] for event in added)
