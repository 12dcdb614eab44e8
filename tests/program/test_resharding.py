"""Replay shards are added and taken away while a run trains: each transition is stored once, and every change told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from history import check
from killer import Killer
from numbered_env import journals
from program_cases import short
from test_kills import experiment, stored, survive

import qfleet.api as api
import qfleet.session
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment
from qfleet.program import place
from qfleet.runtime import checkpoint, ownership

PARTS: dict[str, Any] = {"actors": 3, "elastic.max_shards": 3, "elastic.automatic": "off", "evaluation.every": 10**9}
ROLES = ("actor-0", "actor-2", "replay-0", "replay-1", "replay-2", "learner-0")


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def slowed(folder: Path, env_steps: int, **changes: Any) -> Experiment:
    """Return a run that does not come to its end before an operator has had all that it wishes."""
    marker = folder / "slow"
    marker.touch()
    kwargs = {"journal": str(folder / "journal"), "slow": str(marker)}
    return experiment(folder, env_steps, **{**PARTS, "env.kwargs": kwargs, **changes})


class Operator(Killer):
    """Asks for so many shards when the run has come so many steps, and kills whom it was told to once it has them."""

    def __init__(self, run: Path, *wishes: tuple[int, int, str], kills: int = 0, pause: int = 2) -> None:
        super().__init__(kills=kills, seed=4, pause=pause, roles=ROLES)
        self.run, self.wishes, self.asked = run, list(wishes), 0
        self.present: list[list[int]] = []
        """The shards after each wish."""
        self.victim = ""

    def on_step(self, metrics: dict[str, Any], stop: Callable[[], None]) -> None:
        super().on_step(metrics, stop)
        if self.asked > len(self.present) and len(events_of(self.run, "scaled")) == self.asked:
            self.present.append(self.placement.present("replay"))
            if self.victim:
                os.kill(self.placement.pids()[self.victim], signal.SIGKILL)
        if self.wishes and metrics["env_steps"] >= self.wishes[0][0] and self.asked == len(self.present):
            _, shards, self.victim = self.wishes.pop(0)
            ownership.request_scale(self.run, shards=shards)
            self.asked += 1
        if not self.wishes and self.asked == len(self.present):
            (self.run.parent / "slow").unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "BEAT_S", 0.02)


def changes_of(run: Path) -> list[tuple[str, int, int]]:
    return [(event["what"], event["before"], event["after"]) for event in events_of(run, "elastic")]


def updates_of(run: Path) -> int:
    updates: int = json.loads((run / "summary.json").read_text())["updates"]
    return updates


def test_nothing_is_lost_when_shards_come_and_go_and_some_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = slowed(tmp_path, 2400), tmp_path / "run"
    operator = Operator(folder, (300, 2, ""), (800, 3, "replay-2"), (1400, 1, "replay-0"))
    found, deaths = survive(run, tmp_path, monkeypatch, operator)
    assert operator.present == [[0, 1], [0, 1, 2], [0]]
    assert [(death["role"], death["index"]) for death in deaths] == [("replay", 2), ("replay", 0)]
    assert changes_of(folder) == [("shards", 1, 2), ("shards", 2, 3), ("shards", 3, 1)]
    assert all("asked for by " in event["text"] and event["seconds"] > 0 for event in events_of(folder, "elastic"))
    assert found.sent > 2200
    assert found.stored == found.sent
    assert updates_of(folder) == pytest.approx((2400 - 200) / 8, rel=0.03), "one limiter counts inserts and samples"


@pytest.mark.slow
@pytest.mark.parametrize("storage", [{"kind": "ram"}, {"kind": "mapped"}, {"kind": "lz4", "smallest": 1}])
@pytest.mark.parametrize("capacity", [16_000, 1200])
def test_many_changes_with_many_kills(
    storage: dict[str, Any], capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"replay.capacity": capacity, "replay.storage": storage, "replay.segment": 20}
    run, folder = slowed(tmp_path, 8000, **changes), tmp_path / "run"
    wishes = [(500 + 800 * n, (2, 3, 1)[n % 3], f"replay-{0 if n % 3 == 2 else 1}" if n % 2 else "") for n in range(9)]
    operator = Operator(folder, *wishes, kills=8, pause=800)
    found, deaths = survive(run, tmp_path, monkeypatch, operator)
    assert [len(shards) for shards in operator.present] == [2, 3, 1] * 3
    assert len(deaths) >= 8
    assert found.sent > 7000
    assert found.stored == found.sent if capacity > 8000 else found.stored > 0.7 * capacity


def cut_and_resumed(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int, **changes: Any) -> None:
    """Cut a run that has grown to two shards, go on, let it grow and shrink, and check all that it ever did."""
    run, directory = slowed(folder, steps, **changes), folder / "run"
    operator = Operator(directory, (300, 2, ""))

    def placed(*arguments: Any) -> Any:
        operator.placement = place(*arguments)
        return operator.placement

    def cut(metrics: dict[str, Any], stop: Callable[[], None]) -> None:
        operator.on_step(metrics, stop)
        if operator.present:
            stop()

    monkeypatch.setattr(qfleet.session, "place", placed)
    api.train(run, run_dir=directory, callbacks=Callbacks(on_step=cut))
    operator.wishes = [(0, 3, "replay-1"), (0, 1, "")]
    again: list[list[int]] = []

    def go_on(metrics: dict[str, Any], stop: Callable[[], None]) -> None:
        again.append(operator.placement.present("replay"))
        operator.on_step(metrics, stop)

    api.resume(directory, callbacks=Callbacks(on_step=go_on))
    assert again[0] == [0, 1], "it goes on with as many as it had"
    assert operator.present == [[0, 1], [0, 1, 2], [0]]
    shards = [stored(run, directory, part) for part in range(3)]
    found = check(shards, journals(folder / "journal"), evicting=False)
    assert found.sent > 0.9 * steps
    assert updates_of(directory) == pytest.approx((steps - 200) / 8, rel=0.03)


@pytest.mark.slow
def test_a_run_that_grew_is_cut_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_and_resumed(tmp_path, monkeypatch, 5000)


@pytest.mark.slow
def test_shards_come_and_go_on_ray(ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The actors that become shards take seconds to begin, in which the run goes on."""
    cut_and_resumed(tmp_path, monkeypatch, 40_000, placement="ray")


@pytest.mark.slow
def test_shards_and_learners_change_together_and_each_draw_is_learned_from_once(tmp_path: Path) -> None:
    room = {"placement": "processes", "network.hidden": [16], "elastic.max_learners": 2, "env_steps": 5000}
    wishes = [(500, 2, 2), (1500, 1, 3), (2500, 2, 1)]

    def on_step(metrics: dict[str, Any], stop: Callable[[], None]) -> None:
        if (
            wishes
            and metrics["env_steps"] >= wishes[0][0]
            and len(events_of(tmp_path / "run", "scaled")) == 3 - len(wishes)
        ):
            _, learners, shards = wishes.pop(0)
            ownership.request_scale(tmp_path / "run", None, learners, shards)

    done = api.train(short(**{**PARTS, **room}), run_dir=tmp_path / "run", callbacks=Callbacks(on_step=on_step))
    assert [event["text"] for event in events_of(done.dir, "scaled")][-1] == "3 actors, 2 learners, 1 shard"
    assert len(changes_of(done.dir)) == 6
    owed = (done.summary["env_steps"] - 200) / 4
    assert owed - 4 < done.summary["updates"] <= owed + 3, "parts that draw at the same moment may be ahead by one each"


@pytest.mark.slow
def test_a_run_that_shares_out_its_replay_again_is_resumed_with_other_learners(tmp_path: Path) -> None:
    """What each part holds is saved by itself, in however many processes they are."""
    run = short(**{**PARTS, "placement": "processes", "network.hidden": [16], "env_steps": 600})
    done = api.train(run, run_dir=tmp_path / "run")
    last = checkpoint.complete(done.dir / "checkpoints")[-1]
    seen = [sorted(checkpoint.read_state(last, f"replay-{part}")["replay"]["seen"]) for part in range(3)]
    assert seen == [["actor-0"], ["actor-1"], ["actor-2"]]
    further = api.resume(done.dir, env_steps=1000, learners=2)
    assert further.summary["updates"] == pytest.approx((1000 - 200) / 4, rel=0.06)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"elastic.max_shards": 1, "replay.shards": 2}, "max_shards 1 is below replay.shards 2"),
        ({"elastic.max_shards": 4}, "max_shards 4 exceeds actors 3: some would have no work"),
        ({"placement": "inline"}, "max_shards 3 needs agent.kind 'replay' and placement 'processes' or 'ray'"),
        ({"lockstep": True}, "max_shards 3 needs .* without lockstep"),
        ({"agent.kind": "rollout", "learner.evaluated": "online"}, "max_shards 3 needs agent.kind 'replay'"),
        ({"normalise_rewards": True}, "normalise_rewards needs one replay shard, not 3 .elastic.max_shards."),
        ({"normalise_rewards": True}, "set --normalise_rewards False"),
        (
            {"topology": "fused", "actors": 1, "placement": "inline", "env": {"kind": "tensor", "game": "cartpole"}},
            "max_shards",
        ),
    ],
)
def test_what_could_not_be_shared_out_again_is_refused_before_anything_starts(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        short(**{"placement": "processes", **PARTS, **changes})
