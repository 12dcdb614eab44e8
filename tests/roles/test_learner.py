"""The learner: what it publishes, what it does with updates that are not finite, and how ranks share a batch."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from role_cases import SPEC, Edge, random_batch

from qfleet.accel import choices
from qfleet.accel.config import AccelConfig
from qfleet.accel.hardware import Hardware
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.control.candidates import format_put_back
from qfleet.core.errors import QfleetError
from qfleet.core.role import DONE, WORKED, Idle
from qfleet.core.types import Evaluated, Version
from qfleet.core.usercode import UserCode
from qfleet.roles.learner import Learner, LearnerHandles
from qfleet.roles.learner_setup import LearnerConfig, LearnerSetup


def make_learner(
    accel: AccelConfig | None = None, ahead: bool = False, **settings: object
) -> tuple[Learner, dict[str, Edge]]:
    edges = {
        name: Edge()
        for name in ("batches", "priorities", "weights", "models", "events", "score", "env_steps", "updates")
    }
    setup = LearnerSetup(
        learner=LearnerConfig(**settings),
        network=MlpConfig(hidden=(8,)),
        agent=ReplayAgent(),
        optim=AdamConfig(),
        spec=SPEC,
        seed=0,
        total_updates=100,
        evaluate_every=1000,
        env_steps=10_000,
        device="cpu",
        group=None,
        warm_start=None,
        warm_start_part="all",
        code=UserCode(),
        accel=accel or AccelConfig(),
        ahead=ahead,
    )
    handles = LearnerHandles(**{**edges, **{name: (edges[name],) for name in ("batches", "priorities")}})
    return Learner(setup, handles), edges


def test_weights_are_published_when_there_is_nothing_to_learn_and_only_once():
    learner, edges = make_learner()
    assert learner.step() == WORKED
    assert edges["weights"].queue[0].version == Version(0, 0)
    assert isinstance(learner.step(), Idle)
    edges["batches"].send(random_batch(np.random.default_rng(0)))
    assert learner.step() == WORKED  # learns
    assert len(edges["weights"].queue) == 1
    assert learner.step() == WORKED  # publishes
    first, second = edges["weights"].queue
    assert second.version == Version(0, 1)
    assert not np.array_equal(first.flat, second.flat)


def test_an_idle_learner_beside_others_publishes_at_a_pace(monkeypatch):
    """Whoever reads the weights copies them each time, so it must not publish after every update."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    learner, edges = make_learner(ahead=True)
    assert learner.step() == WORKED  # publishes
    learner._publishing._seconds = 0.01  # as if that had taken so long
    edges["batches"].send(random_batch(np.random.default_rng(0)))
    assert learner.step() == WORKED  # learns
    status = learner.step()
    assert isinstance(status, Idle)
    assert status.deadline == pytest.approx(0.16)
    assert len(edges["weights"].queue) == 1
    now += 0.17
    assert learner.step() == WORKED
    assert edges["weights"].queue[-1].version == Version(0, 1)
    assert learner.step() == Idle("no batch", wake_on=(edges["batches"],))


def test_a_busy_learner_publishes_too():
    learner, edges = make_learner(publish_period=2)
    rng = np.random.default_rng(0)
    for _ in range(6):
        edges["batches"].send(random_batch(rng))
    for _ in range(6):
        learner.step()
    assert [w.version.number for w in edges["weights"].queue] == [2, 4, 6]


def test_a_busy_learner_beside_others_does_not_spend_its_time_on_publishing(monkeypatch):
    """Atari on a GPU: 3,900 updates a second published every 32 updates, and that took three quarters of the time."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    learner, edges = make_learner(ahead=True, publish_period=1)
    assert learner.step() == WORKED  # publishes
    learner._publishing._seconds = 0.01  # as if that had taken so long
    rng = np.random.default_rng(0)
    for _ in range(20):
        now += 0.05
        edges["batches"].send(random_batch(rng))
        learner.step()
    assert [w.version.number for w in edges["weights"].queue][:2] == [0, 4]  # 0.2 s after the first


def test_nan_in_a_loss_skips_the_update_and_names_it():
    learner, edges = make_learner()
    learner.step()
    before = edges["weights"].queue[-1].flat
    edges["batches"].send(random_batch(np.random.default_rng(0), reward=np.nan))
    learner.step()
    assert edges["updates"].count == 0
    assert len(edges["priorities"].queue) == 0
    assert "update 1" in edges["events"].queue[-1].text
    learner.step()
    assert np.array_equal(before, edges["weights"].queue[-1].flat)
    assert learner.metrics()["skipped_updates"] == 1


def test_three_nan_updates_in_a_row_stop_the_run_and_a_good_one_between_does_not():
    learner, edges = make_learner()
    rng = np.random.default_rng(0)
    for reward in (np.nan, np.nan, 0.5, np.nan, np.nan):
        edges["batches"].send(random_batch(rng, reward=reward))
        learner.step()
    edges["batches"].send(random_batch(rng, reward=np.nan))
    with pytest.raises(QfleetError, match="3 updates in a row were not finite"):
        learner.step()


def test_a_model_is_offered_once_for_each_evaluation_period_and_at_the_end():
    learner, edges = make_learner()
    edges["env_steps"].count = 2500
    learner.step()
    learner.step()
    assert [w.env_steps for w in edges["models"].queue] == [2500]
    edges["batches"].close()
    while learner.step() != DONE:
        pass
    assert len(edges["models"].queue) == 2
    assert edges["models"].closed


def test_beside_others_a_model_is_offered_only_when_the_one_before_it_is_judged():
    """It would wait for the evaluator, and be old when its turn comes."""
    learner, edges = make_learner(ahead=True)
    edges["env_steps"].add(1000)
    assert learner.step() == WORKED
    edges["models"].receive()  # the evaluator plays
    edges["env_steps"].add(2000)
    for _ in range(3):
        learner.step()
    assert not edges["models"].queue
    edges["env_steps"].add(500)
    edges["score"].publish(Evaluated(Version(), 1000, np.ones(2), np.ones(2, np.int64), 0.0, True, None))
    learner.step()
    (model,) = edges["models"].queue
    assert model.env_steps == 3500


def test_a_restored_learner_makes_the_same_updates():
    rng = np.random.default_rng(1)
    batches = [random_batch(rng) for _ in range(6)]
    whole, edges = make_learner()
    for batch in batches:
        edges["batches"].send(batch)
        whole.step()
    part, part_edges = make_learner()
    for batch in batches[:3]:
        part_edges["batches"].send(batch)
        part.step()
    rest, rest_edges = make_learner()
    rest.load_state_dict(part.state_dict())
    for batch in batches[3:]:
        rest_edges["batches"].send(batch)
        rest.step()
    expected, found = whole.state_dict()["update"]["step"]["weights"], rest.state_dict()["update"]["step"]["weights"]
    assert np.array_equal(expected, found)


def test_a_batch_without_global_size_counts_itself():
    with_size, edges_a = make_learner()
    without, edges_b = make_learner()
    batch = random_batch(np.random.default_rng(2))
    edges_a["batches"].send(batch)
    edges_b["batches"].send(dataclasses.replace(batch, global_size=0))
    with_size.step()
    without.step()
    assert np.array_equal(
        with_size.state_dict()["update"]["step"]["weights"], without.state_dict()["update"]["step"]["weights"]
    )


def weights_of(learner: Learner) -> np.ndarray:
    return learner.state_dict()["update"]["step"]["weights"]


def test_the_hand_written_network_learns_what_the_eager_one_learns():
    learners = [make_learner(accel) for accel in (AccelConfig(), AccelConfig(kernels="off"))]
    start = weights_of(learners[0][0])
    said = [edges["events"].queue[0].text for _, edges in learners]
    assert [text.split(" (")[0] for text in said] == ["cpu: fp32, hand-written small network", "cpu: fp32, eager"]
    for learner, edges in learners:
        rng = np.random.default_rng(3)
        for _ in range(20):
            edges["batches"].send(random_batch(rng))
            learner.step()
    ours, eager = (weights_of(learner) for learner, _ in learners)
    assert np.abs(ours - eager).max() < 1e-3 * np.abs(eager - start).max()


def test_a_learner_resumed_with_other_settings_says_that_its_numbers_differ():
    saved = make_learner()[0].state_dict()
    for accel, kinds in ((None, ["accel"]), (AccelConfig(kernels="off"), ["accel", "accel_changed"])):
        learner, edges = make_learner(accel)
        learner.load_state_dict(saved)
        assert [notice.kind for notice in edges["events"].queue] == kinds
    before, edges = make_learner(AccelConfig(kernels="off"))
    before.load_state_dict({name: part for name, part in saved.items() if name != "settings"})
    assert [notice.kind for notice in edges["events"].queue] == ["accel"]


@pytest.fixture
def float16(monkeypatch):
    """A learner that takes this CPU for a GPU, with a loss scale that does not fit."""
    monkeypatch.setattr(choices, "look", lambda device: Hardware("cuda", "some GPU", (9, 0)))
    with format_put_back():
        learner, edges = make_learner(AccelConfig(precision="fp16", kernels="off"))
        learner._choices.scale.value.fill_(2.0**24)
        yield learner, edges


def test_skips_for_which_the_loss_scale_is_to_blame_do_not_stop_the_run(float16):
    learner, edges = float16
    rng = np.random.default_rng(0)
    for _ in range(20):
        edges["batches"].send(random_batch(rng))
        learner.step()
    skipped = learner.metrics()["skipped_updates"]
    assert skipped > 3  # as many as would stop it
    assert learner.metrics()["updates"] == edges["updates"].count == 20 - skipped
    assert len(edges["priorities"].queue) == 20 - skipped


def test_in_float16_too_updates_that_are_not_a_number_stop_the_run(float16):
    learner, edges = float16
    rng = np.random.default_rng(0)
    for _ in range(3):
        edges["batches"].send(random_batch(rng, reward=np.nan))
    learner.step()
    learner.step()
    with pytest.raises(QfleetError, match="3 updates in a row were not finite"):
        learner.step()
