"""A learner group over two Ray nodes: its updates are those of one learner, and it outlives the loss of a node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from program_cases import short
from test_regrouping import finish, require_equal, save, scripted

import qfleet.api as api
import qfleet.session
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import ConfigError
from qfleet.core.types import Notice
from qfleet.program import place
from qfleet.roles.learner import NO_BATCH

PATIENCE_S = 300.0
PREEMPTION = 2
"""Ray's reason for draining a spot instance."""


def apart(placement: Any) -> bool:
    return bool(placement.home("learner-0") != placement.home("learner-1"))


def drain(node: str) -> None:
    import ray

    from qfleet.runtime import ray_cluster

    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(node, PREEMPTION, "the spot price rose", int(1000 * (time.time() + 120)))
    assert accepted, why
    assert node in ray_cluster.draining()


def until(placement: Any, met: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < end, placement.reports()
        placement.advance()


@pytest.mark.slow
def test_the_updates_of_a_group_over_two_nodes_are_those_of_one_learner(later_node: Any, tmp_path: Path) -> None:
    """Also when the rank there leaves, and comes again, and must move because its node is to go."""
    from qfleet.runtime.ray import RayPlacement

    draws, other = 1500, later_node.begin()
    graph, counter = scripted(draws, 2, tmp_path)
    placement = RayPlacement(graph, groups=("learner",), across=("learner",))
    try:
        assert apart(placement)
        told = [one for one in placement.incidents() if isinstance(one, Notice)]
        assert [one.kind for one in told] == ["network"]
        assert "without encryption" in told[0].text
        updates = placement.open(counter)
        until(placement, lambda: updates.total() >= 60)
        assert not placement.regroup("learner", 1, NO_BATCH)
        assert placement._meeting is None, "nobody listens where all of a group is on one node"
        until(placement, lambda: updates.total() >= 120)
        assert not placement.regroup("learner", 2, NO_BATCH)
        assert apart(placement)
        until(placement, lambda: updates.total() >= 200)
        drain(other)
        assert not placement.regroup("learner", 2, NO_BATCH)
        assert not apart(placement)
        finish(placement)
        folder = tmp_path / "saved"
        folder.mkdir()
        save(placement, folder)
        assert updates.total() == draws, "each draw is one update"
    finally:
        placement.close()
    require_equal(folder, draws, tmp_path / "alone")


class Loser:
    """Lets a node be lost when the run has come a number of steps, and notes where the ranks are."""

    def __init__(self, lose: Callable[[], None], at: int) -> None:
        self._lose, self._at, self.placement = lose, at, None
        self.apart = False

    def on_step(self, metrics: dict[str, Any], stop: Any) -> None:
        if self._at and metrics["env_steps"] >= self._at:
            self.apart, self._at = apart(self.placement), 0
            self._lose()

    def placed(self, *arguments: Any) -> Any:
        self.placement = place(*arguments)
        return self.placement


@pytest.mark.slow
@pytest.mark.parametrize("after", ["same", "fewer"])
def test_a_group_goes_on_when_the_node_of_one_of_its_ranks_is_lost(
    after: str, second_node: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loser = Loser(second_node, at=1500)
    monkeypatch.setattr(qfleet.session, "place", loser.placed)
    experiment = short(
        env_steps=6000,
        placement="ray",
        learners=2,
        **{
            "parallel.across_nodes": True,
            "parallel.after_death": after,
            "network.hidden": [16],
            "learner.snapshot_s": 0.05,
            "checkpoint.every": 10**9,
            "evaluation.every": 10**9,
            "evaluation.target": None,
        },
    )
    run = api.train(experiment, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=loser.on_step))
    events = [json.loads(line) for line in (run.dir / "events.jsonl").read_text().splitlines()]
    assert loser.apart, "a rank was on the other node"
    assert run.summary["env_steps"] >= 6000
    restarted = [one["text"] for one in events if one.get("kind") == "restarted"]
    assert len(restarted) == 1, "one life of the group ended"
    assert restarted[0].endswith(", 2 ranks" if after == "same" else ", 1 rank")
    assert sum(one.get("kind") == "fewer" for one in events) == (after == "fewer")
    lost = int(restarted[0].split(": ")[1].split()[0])
    owed = (run.summary["env_steps"] - 200) / 4
    assert owed - lost - 20 <= run.summary["updates"] <= owed + 1


RAY = "--placement ray (not 'processes')"
GROUP = "--learners 2 or more, or --elastic.max_learners 2 or more"
WHOLE = "whole networks"


@pytest.mark.parametrize(
    ("changes", "missing", "words"),
    [
        ({"placement": "processes", "learners": 2}, {RAY}, ""),
        ({"learners": 1}, {GROUP}, ""),
        ({"placement": "processes", "learners": 1}, {RAY, GROUP}, ""),
        ({"learners": 1, "parallel.tensor": 2}, {WHOLE}, "--parallel.tensor 1"),
        ({"learners": 1, "parallel.pipeline": 2}, {WHOLE}, "--parallel.pipeline 1"),
        ({"learners": 2, "parallel.update": {"kind": "sharded"}}, {WHOLE}, "not 'sharded'"),
        ({"learners": 2, "parallel.update": {"kind": "server", "servers": 1}}, {WHOLE}, "not 'server'"),
        ({"learners": 2, "topology": "fused"}, {"--topology pipeline"}, ""),
    ],
)
def test_what_cannot_be_on_several_nodes_is_refused_with_what_is_missing(
    changes: dict[str, Any], missing: set[str], words: str
) -> None:
    """A user was told all conditions, and had to find out which one was meant."""
    with pytest.raises(ConfigError, match=r"parallel.across_nodes needs") as refused:
        short(**{"placement": "ray", "network.hidden": [16], "parallel.across_nodes": True, **changes})
    assert {one for one in (RAY, GROUP, WHOLE, "--topology pipeline") if one in str(refused.value)} == missing
    assert words in str(refused.value)
