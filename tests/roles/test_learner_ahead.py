"""A learner that works ahead of its device: it learns what the other one learns, and loses nothing when it stops."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from role_cases import Edge, random_batch
from test_learner import make_learner

from qfleet.core import codec
from qfleet.core.errors import QfleetError
from qfleet.core.role import DONE, WORKED, Idle
from qfleet.core.types import Batch
from qfleet.roles import learning, publishing
from qfleet.roles.learner import Learner
from qfleet.roles.learner_setup import GroupConfig
from qfleet.roles.updating import Ahead, OneByOne

sys.path.append(str(Path(__file__).parents[1] / "accel"))
from fake_link import HastyLink

LATE = 3
"""How often a learner asks in vain what came of an update."""


@dataclasses.dataclass
class Clock:
    """A clock that moves on by a tick with each look at it."""

    tick: float
    now: float = 0.0

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now


def make_ahead(late: int = LATE, **changes: Any) -> tuple[Learner, dict[str, Edge]]:
    with patch.object(learning, "link_for", lambda setup: HastyLink(late)):
        return make_learner(**changes)


def feed(learner: Learner, edges: dict[str, Edge], batches: list[Batch]) -> None:
    for batch in batches:
        edges["batches"].send(batch)
        learner.step()


def finish(learner: Learner, edges: dict[str, Edge]) -> None:
    edges["batches"].close()
    for _ in range(100):
        if learner.step() == DONE:
            return
    raise AssertionError("never done")


def batches_of(seed: int, count: int) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [random_batch(rng, size=8 + n // 5) for n in range(count)]


def flat(learner: Learner) -> np.ndarray:
    return learner.state_dict()["update"]["step"]["weights"]


def sent(edges: dict[str, Edge]) -> list[tuple[list[int], list[float]]]:
    return [(message.index.tolist(), message.priority.tolist()) for message in edges["priorities"].queue]


def numbered(batches: list[Batch]) -> list[Batch]:
    """The same batches, each with rows of its own."""
    return [dataclasses.replace(b, index=b.index + 100 * n, generation=b.generation + n) for n, b in enumerate(batches)]


@pytest.mark.parametrize("late", [0, 1, 3, 10**6])
def test_it_learns_what_the_other_one_learns(late):
    batches = numbered(batches_of(1, 23))
    results = []
    for learner, edges in (make_learner(), make_ahead(late)):
        feed(learner, edges, batches)
        finish(learner, edges)
        assert learner.metrics()["updates"] == edges["updates"].count == 23
        results.append((flat(learner), sent(edges), learner.metrics()["policy_lag"], learner.metrics()["loss"]))
    assert np.array_equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


def test_arrays_may_be_gone_after_the_step_that_received_them():
    clean, spoilt = batches_of(2, 9), batches_of(2, 9)
    learners = [make_ahead() for _ in range(2)]
    for batch in clean:
        feed(*learners[0], [batch])
    for batch in spoilt:
        feed(*learners[1], [batch])
        for array in (*batch.observation.values(), batch.action, batch.reward, batch.index, batch.generation):
            array.fill(1)
    for learner, edges in learners:
        finish(learner, edges)
    assert np.array_equal(*(flat(learner) for learner, _ in learners))
    assert sent(learners[0][1]) == sent(learners[1][1])


def test_one_batch_is_on_its_way_while_one_is_learned_from():
    learner, edges = make_ahead()
    for batch in batches_of(3, 3):
        edges["batches"].send(batch)
    seen = []
    for _ in range(4):
        learner.step()
        seen.append((learner._batches_seen, learner._updating.waiting))
    assert seen == [(0, 1), (1, 1), (2, 1), (3, 0)]


def test_with_nothing_else_to_do_it_waits_for_the_device_and_tells_the_priorities():
    learner, edges = make_ahead(late=10**6)
    feed(learner, edges, batches_of(4, 2))
    learner.step()
    assert len(edges["priorities"].queue) == 0
    for done in (1, 2):  # it looks for a batch before it waits again: the device must not run out of work
        assert learner.step() == WORKED
        assert len(edges["priorities"].queue) == edges["updates"].count == done
    assert learner.step() == WORKED  # publishes
    assert isinstance(learner.step(), Idle)


def test_priorities_wait_for_room_in_order():
    learner, edges = make_ahead(late=1)
    edges["priorities"].capacity = 1
    batches, taken = numbered(batches_of(5, 12)), []
    edges["batches"].queue.extend(batches)
    edges["batches"].close()
    reasons = set()
    while (status := learner.step()) != DONE:
        if isinstance(status, Idle):
            reasons.add(status.reason)
            taken.append(edges["priorities"].receive())
    taken += list(edges["priorities"].queue)
    assert reasons == {"replay has not taken the priorities"}
    assert [message.generation[0] for message in taken] == list(range(12))
    assert all(np.array_equal(message.index, batch.index) for message, batch in zip(taken, batches, strict=True))


@given(cut=st.integers(0, 11), late=st.integers(0, 4), room=st.integers(1, 3))
@settings(max_examples=25)
def test_cut_and_restored_it_makes_the_same_updates_and_tells_every_priority_once(cut, late, room):
    batches = numbered(batches_of(6, 12))
    whole, whole_edges = make_learner()
    feed(whole, whole_edges, batches)
    part, part_edges = make_ahead(late)
    part_edges["priorities"].capacity = room
    part_edges["batches"].queue.extend(batches[:cut])
    for _ in range(cut):
        part.step()
    state = codec.roundtrip(part.state_dict())
    assert part_edges["updates"].count == state["counters"][1]
    rest, rest_edges = make_ahead(late)
    rest.load_state_dict(state)
    rest_edges["batches"].queue.extend([*part_edges["batches"].queue, *batches[cut:]])
    finish(rest, rest_edges)
    assert np.array_equal(flat(whole), flat(rest))
    assert sent(part_edges) + sent(rest_edges) == sent(whole_edges)
    assert part_edges["updates"].count + rest_edges["updates"].count == 12


def test_a_checkpoint_goes_on_where_every_update_is_waited_for():
    part, edges = make_ahead()
    feed(part, edges, batches_of(7, 5))
    rest, rest_edges = make_learner()
    rest.load_state_dict(codec.roundtrip(part.state_dict()))
    finish(rest, rest_edges)
    assert np.array_equal(flat(part), flat(rest))
    assert sent(edges) + sent(rest_edges) == [(m.index.tolist(), m.priority.tolist()) for m in _all(7, 5)]


def _all(seed: int, count: int) -> list[Any]:
    learner, edges = make_learner()
    feed(learner, edges, batches_of(seed, count))
    return list(edges["priorities"].queue)


def test_a_skipped_update_is_counted_and_named_and_its_priorities_are_not_told():
    learner, edges = make_ahead()
    rng = np.random.default_rng(8)
    feed(learner, edges, [random_batch(rng, reward=reward) for reward in (0.1, np.nan, 0.2)])
    finish(learner, edges)
    assert edges["updates"].count == 2
    assert len(edges["priorities"].queue) == 2
    assert learner.metrics()["skipped_updates"] == 1
    notices = [notice.text for notice in edges["events"].queue if notice.kind == "skipped_update"]
    assert len(notices) == 1
    assert "update 2" in notices[0]


@pytest.mark.parametrize("late", [0, 2, 10**6])
def test_several_nan_updates_in_a_row_stop_the_run_though_they_are_told_of_late(late):
    learner, edges = make_ahead(late)
    rng = np.random.default_rng(9)
    feed(learner, edges, [random_batch(rng, reward=0.5)])
    edges["batches"].queue.extend(random_batch(rng, reward=np.nan) for _ in range(3))
    with pytest.raises(QfleetError, match="3 updates in a row were not finite"):
        finish(learner, edges)


def test_a_kept_state_counts_what_it_holds():
    learner, edges = make_ahead(late=10**6)
    feed(learner, edges, batches_of(10, 6))
    state = learner._commit()  # as every few seconds: without learning from what is on its way
    assert learner._updating.waiting == 1
    assert state["counters"][:2] == [5, 5]
    assert state["update"]["step"]["count"] == 5


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, OneByOne),
        ({"ahead": True}, OneByOne),
        ({"device": "cuda"}, OneByOne),
        ({"ahead": True, "device": "cuda"}, Ahead),
        ({"ahead": True, "device": "cuda", "group": GroupConfig(0, 2, "")}, OneByOne),
    ],
)
def test_only_a_learner_alone_beside_other_processes_works_ahead_of_its_gpu(monkeypatch, changes, kind):
    learner, _ = make_learner()
    monkeypatch.setattr(learning, "CudaLink", lambda device: HastyLink(0))
    setup = dataclasses.replace(learner._setup, **changes)
    learner._learning.link = learning.link_for(setup)
    assert type(learner._learning.updating(setup)) is kind


@pytest.mark.parametrize("late", [0, 1, 5, 10**6])
@pytest.mark.parametrize("period", [1, 3])
def test_weights_that_leave_the_device_meanwhile_are_those_of_their_version(late, period):
    batches = batches_of(11, 20)
    plain, plain_edges = make_learner(publish_period=1)
    plain.step()
    feed(plain, plain_edges, batches)
    known = {weights.version.number: weights for weights in plain_edges["weights"].queue}
    learner, edges = make_ahead(late, publish_period=period)
    edges["env_steps"].count = 7
    feed(learner, edges, batches)
    finish(learner, edges)
    published = list(edges["weights"].queue)
    for weights in published:
        assert np.array_equal(weights.flat, known[weights.version.number].flat)
        assert weights.checksum == known[weights.version.number].checksum
        assert weights.env_steps == 7
    numbers = [weights.version.number for weights in published]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 20, "the last ones come out, too"
    assert late or len(numbers) >= 20 // period, "a busy learner publishes, too"


def test_a_learner_with_work_to_do_does_not_wait_for_weights_to_leave_its_device():
    """It waited for all that the device had before it, which then had nothing to do while weights were published."""
    learner, edges = make_ahead(late=10**6, publish_period=1)
    feed(learner, edges, batches_of(12, 6))
    assert len(edges["weights"].queue) == 0
    while not isinstance(learner.step(), Idle):
        pass
    assert [weights.version.number for weights in edges["weights"].queue] == [1, 6]


def test_weights_that_have_left_the_device_go_out_at_once():
    """They waited for the next publication to be due, and counted that as the time which a publication takes."""
    learner, edges = make_ahead(late=2, publish_period=10)
    feed(learner, edges, batches_of(13, 11))  # the tenth batch is learned from when the eleventh comes
    assert len(edges["weights"].queue) == 0
    feed(learner, edges, batches_of(14, 2))
    assert [weights.version.number for weights in edges["weights"].queue] == [10]


def test_the_time_in_which_weights_leave_the_device_is_no_cost_of_publishing_them(monkeypatch):
    clock = Clock(tick=1.0)
    monkeypatch.setattr(publishing, "time", clock)
    learner, edges = make_ahead(late=2, publish_period=10, ahead=True)
    feed(learner, edges, batches_of(13, 11))
    clock.now += 1000  # the device has much to do before
    feed(learner, edges, batches_of(14, 2))
    assert len(edges["weights"].queue) == 1
    assert 0 < learner._publishing.too_soon() < 1000


@pytest.mark.parametrize("ahead_of_a_device", [False, True])
def test_looks_that_find_it_too_soon_are_no_cost_of_publishing(monkeypatch, ahead_of_a_device):
    """They were counted, times sixteen, so that the next weights came later, after still more looks: without end."""
    clock = Clock(tick=1.0)
    monkeypatch.setattr(publishing, "time", clock)
    changes = {"publish_period": 1, "ahead": True}
    learner, edges = make_ahead(late=0, **changes) if ahead_of_a_device else make_learner(**changes)
    numbers = [0]
    for batch in batches_of(15, 400):
        feed(learner, edges, [batch])
        edges["priorities"].queue.clear()
        numbers.append(len(edges["weights"].queue))
    published = np.diff(numbers)
    gaps = np.diff(np.flatnonzero(published))
    assert len(gaps) > 20
    assert gaps[-1] <= 2 * gaps[0], "weights go out as often in the end as in the beginning"


def test_weights_on_their_way_are_forgotten_when_the_learner_goes_back():
    """They were published, with a later version than that of what it went back to."""
    learner, edges = make_ahead(late=10**6, publish_period=1)
    saved = learner.state_dict()
    feed(learner, edges, batches_of(6, 6))
    learner.load_state_dict(saved)
    for _ in range(3):
        learner.step()
    assert {weights.version.number for weights in edges["weights"].queue} == {0}
