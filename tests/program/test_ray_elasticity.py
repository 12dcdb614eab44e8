"""A Ray node joins a run, is drained, comes again and is lost: actors follow, and the run goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from program_cases import short

import qfleet.api as api
import qfleet.session
from qfleet.control.monitor import Callbacks
from qfleet.program import place
from qfleet.runtime import checkpoint

PREEMPTION = 2
"""Ray's reason for draining a spot instance."""
PATIENCE_S = 300.0


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


class Story:
    """Lets one thing happen after the other, each when what the last one led to has been seen."""

    def __init__(self, run: Path, node: Any) -> None:
        self.run, self.node, self.id = run, node, ""
        self.placement: Any = None
        self.steps: list[int] = []
        self.chapters: list[tuple[Callable[[], bool], Callable[[], None]]] = [
            (lambda: self.steps[-1] > 500, self.join),
            (lambda: self.acting() > 0, self.drain),
            (lambda: not self.there(), self.lose),
            (lambda: True, self.join),
            (lambda: self.acting() > 0, self.lose),
            (lambda: not self.there() and self.told("node_lost") == 1, self.note),
            (lambda: self.steps[-1] > self.noted + 300, lambda: None),
        ]
        self.noted, self.until = 0, time.monotonic() + PATIENCE_S

    def placed(self, *arguments: Any) -> Any:
        self.placement = place(*arguments)
        return self.placement

    def there(self) -> list[int]:
        """Actors on the other node."""
        return [index for index in self.placement.present("actor") if self.placement.home(f"actor-{index}") == self.id]

    def acting(self) -> int:
        """How many of them have acted there."""
        reports = {report.index: report for report in self.placement.reports() if report.kind == "actor"}
        return sum(reports[index].metrics.get("env_steps", 0) > 0 for index in self.there() if index in reports)

    def told(self, kind: str) -> int:
        return sum(event.get("kind") == kind for event in events_of(self.run))

    def join(self) -> None:
        self.id = self.node.begin()

    def drain(self) -> None:
        import ray

        client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
        deadline = int(1000 * (time.time() + 120))
        accepted, why = client.drain_node(self.id, PREEMPTION, "the spot price rose", deadline)
        assert accepted, why

    def lose(self) -> None:
        self.node.end()

    def note(self) -> None:
        self.noted = self.steps[-1]

    def on_step(self, metrics: dict[str, Any], stop: Callable[[], None]) -> None:
        self.steps.append(metrics["env_steps"])
        assert time.monotonic() < self.until, (len(self.chapters), events_of(self.run))
        if not self.chapters:
            stop()
        elif self.chapters[0][0]():
            self.chapters.pop(0)[1]()
            self.until = time.monotonic() + PATIENCE_S


@pytest.mark.slow
def test_nodes_join_are_drained_and_are_lost_and_the_run_goes_on(
    later_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path / "run", later_node)
    monkeypatch.setattr(qfleet.session, "place", story.placed)
    settings = {
        "placement": "ray",
        "env.id": "straggling_env:Straggling-v0",  # which leaves the cores to Ray
        "env.kwargs": {"straggler": "", "begins": 0, "note": ""},
        "actor.envs": 4,
        "network.hidden": [16],
        "elastic.max_actors": 3,
        "elastic.settle_s": 1.0,
        "learner.learning_starts": 10**5,
        "replay.capacity": 2 * 10**5,
        "balance": "off",
        "checkpoint.every": 10**9,
        "evaluation.every": 10**9,
    }
    run = api.train(short(env_steps=10**8, **settings), run_dir=story.run, callbacks=Callbacks(on_step=story.on_step))
    assert story.chapters == []
    assert story.steps == sorted(story.steps), "what was counted stays counted"
    elastic = [
        (event["before"], event["after"], event["text"]) for event in events_of(run.dir) if event["event"] == "elastic"
    ]
    left = [(after, text) for before, after, text in elastic if after < before]
    assert [after for after, _ in left] == [0]
    assert "is to go (Ray drains it; " in left[0][1]
    assert sum("joined with 2 cores" in text for _, _, text in elastic) >= 2
    state = checkpoint.read_state(checkpoint.complete(run.dir / "checkpoints")[-1], "replay-0")["replay"]
    assert state["counts"]["duplicates"] == 0
    stored = state["counts"]["inserted"]
    assert stored >= 0.97 * run.summary["env_steps"], "only what was on its way from the lost node is missing"
