"""What feeding a GPU's learner is measured to cost, and what a plan makes of it: rows as they are, and a copy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_cases import GIB, US, experiment, measurements, resources

import qfleet.planning as planning
from qfleet.control import feeding, machine, pieces
from qfleet.control.feeding import BATCHES, STREAMS, FeedCost, feed_cost
from qfleet.control.measurements import LearnerCost
from qfleet.control.planner import make_plan
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.setups import learner_setup

FRAMES = EnvSpec(name="frames", observations={PLAIN: LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)}, actions=3)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pieces, "PIECE_S", 0.03)


def fed(mirrored: bool, **changes: Any) -> FeedCost:
    small = {
        "placement": "processes",
        "device": DEVICE,
        "replay.storage.kind": "ram",
        "replay.capacity": 2000,
        "learner.learning_starts": 100,
    }
    run = with_changes(preset("atari:pong"), {**small, "learner.batch_size": 256, **changes})
    return feed_cost(learner_setup(run, FRAMES, UserCode(), None), run.replay, mirrored)


def test_a_shard_draws_row_numbers_faster_than_frames() -> None:
    tiny = {"network.kind": "mlp", "network.hidden": (2,)}
    plain, mirrored = fed(mirrored=False, **tiny), fed(mirrored=True, **tiny)
    assert 0 < 2 * mirrored.draw < plain.draw, "14 MB of frames, or 16 kB of numbers"
    assert 0 < 2 * mirrored.message < plain.message
    assert min(plain.store, mirrored.store, plain.update, mirrored.update) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_copy_of_the_frames_saves_their_way_up() -> None:
    assert fed(mirrored=True).update < fed(mirrored=False).update


def test_what_a_gpus_learner_saves_the_replay_counts_in_its_plan() -> None:
    cheap = LearnerCost(device="cuda", threads=1, seconds=1 * US)
    slow = measurements(env=1 * US, act=1 * US, replay=500 * US, learners=(cheap,))
    saved = measurements(
        env=1 * US, act=1 * US, replay=500 * US, learners=(cheap.replace(replay=5 * US, batch_message=0.0),)
    )
    rates = [
        make_plan(experiment(), costs, resources(gpu="a GPU"), {"placement"}).env_steps_per_s for costs in (slow, saved)
    ]
    assert rates[0] is not None
    assert rates[1] is not None
    assert rates[1] > 5 * rates[0]


def stored(run: Experiment, monkeypatch: pytest.MonkeyPatch, fixed: set[str] | None = None, **machine: Any) -> str:
    monkeypatch.setattr(planning, "mirrored", lambda experiment, spec: True)
    found = resources(**{"gpu": "a GPU", **machine})
    return planning._stored(run, FRAMES, found, fixed or set()).replay.storage.kind


def test_frames_are_stored_as_they_are_for_a_gpu_where_memory_abounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pong = preset("atari:pong")
    assert pong.replay.storage.kind == "lz4"
    assert stored(pong, monkeypatch) == "ram"
    assert stored(pong, monkeypatch, gpu="") == "lz4"
    assert stored(pong, monkeypatch, shared_memory=8 * GIB) == "lz4"
    assert stored(pong, monkeypatch, memory=8 * GIB) == "lz4"
    assert stored(pong, monkeypatch, fixed={"replay.storage.kind"}) == "lz4"
    assert stored(with_changes(pong, {"device": "cpu"}), monkeypatch) == "lz4"
    assert stored(with_changes(pong, {"replay.storage.kind": "mapped"}), monkeypatch) == "mapped"


def drawing(at_once: float) -> Any:
    """Costs of a machine whose GPU learns in so many microseconds a step when sixteen batches are drawn at once."""
    single = LearnerCost(device="cuda", threads=1, seconds=300 * US)
    together = single.replace(updates_per_draw=16, seconds=at_once * US)
    return measurements(env=10 * US, act=10 * US, replay=1 * US, learners=(single, together))


@pytest.mark.parametrize(
    ("at_once", "fixed", "drawn"),
    [(40.0, set(), 16), (299.0, set(), None), (40.0, {"learner.updates_per_draw"}, None)],
    ids=["the learner holds the run up", "nothing is gained", "the user has decided"],
)
def test_batches_are_drawn_at_once_only_where_the_run_gains_by_it(at_once: float, fixed: set[str], drawn: Any) -> None:
    plan = make_plan(experiment(), drawing(at_once), resources(gpu="a GPU"), {"placement", *fixed})
    assert plan.settings.get("learner.updates_per_draw") == drawn
    assert ("learner.updates_per_draw" in plan.reasons) == (drawn is not None)


@pytest.mark.parametrize(
    ("changes", "tried"),
    [
        ({}, [1, 16]),
        ({"learner.updates_per_draw": 32}, [32]),
        ({"replay.sampler": {"kind": "prioritised"}}, [1]),
        ({"env_steps": 20_060}, [1]),
    ],
    ids=["by default", "more already", "priorities would be late", "the run is too short"],
)
def test_a_gpu_is_timed_with_every_number_of_draws_that_is_allowed(changes: dict[str, Any], tried: list[int]) -> None:
    asked: list[int] = []

    def feed(updates: int) -> FeedCost:
        asked.append(updates)
        return FeedCost(store=1 * US, draw=1 * US, message=1 * US, update=100 * US / updates)

    run, first = with_changes(preset("atari:pong"), changes), SimpleNamespace(updates=0.25)
    found = list(machine._on_gpu(None, run, first, feed))
    assert asked == tried == [cost.updates_per_draw for cost in found]
    assert [cost.seconds for cost in found] == [pytest.approx(25 * US / updates) for updates in tried]


def test_no_batch_brings_up_more_than_what_came_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them had all that the replay was filled with: updates seemed to take a third longer."""
    learned: list[Any] = []

    def look(setup: Any, batches: list[Any], rows: Any) -> float:
        learned.extend(batches)
        return 1.0

    monkeypatch.setattr(feeding, "_update_seconds", look)
    fed(mirrored=True, **{"learner.train_period": 4.0})
    assert [len(batch.fresh) for batch in learned] == [STREAMS] * BATCHES
