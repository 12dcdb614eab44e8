"""What learners and parameter servers hand on to each other: the same values to the bit, books that go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from role_cases import random_batch
from serving_cases import Fleet, feed

from qfleet.core import codec
from qfleet.roles import handover


def learned(updates: int = 5, **serving: Any) -> Fleet:
    """Servers and workers that have learned something."""
    fleet = Fleet(**serving)
    feed(fleet, [random_batch(np.random.default_rng(seed)) for seed in range(updates)])
    fleet.run()
    return fleet


def inherited(fleet: Fleet) -> handover.Heritage:
    states = [[codec.roundtrip(role.state_dict()) for role in roles] for roles in (fleet.workers, fleet.servers)]
    return handover.of_servers(*states)


def handed_on(heritage: handover.Heritage, fleet: Fleet) -> None:
    """Let a fleet begin with what another one left."""
    for worker in fleet.workers:
        worker.load_state_dict(codec.roundtrip(handover.for_worker(heritage, worker._setup)))
    for server in fleet.servers:
        server.load_state_dict(codec.roundtrip(handover.for_server(heritage, server._setup)))


@given(
    first=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    second=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    modes=st.tuples(*[st.sampled_from(["sync", "async", "stale"])] * 2),
)
@settings(max_examples=15)
def test_servers_hand_on_to_other_servers_what_they_have(first, second, modes) -> None:
    before = learned(workers=first[0], servers=first[1], mode=modes[0], max_staleness=8)
    heritage = inherited(before)
    after = Fleet(workers=second[0], servers=second[1], mode=modes[1], max_staleness=8)
    handed_on(heritage, after)
    np.testing.assert_array_equal(after.parameters, before.parameters)
    assert set(after.versions) == {heritage.updates}
    again = inherited(after)
    for one, other in zip(codec.pack(again.update)[1], codec.pack(heritage.update)[1], strict=True):
        np.testing.assert_array_equal(one, other, "weights, moments, target")
    feed(after, [random_batch(np.random.default_rng(seed)) for seed in range(10, 13)])
    after.run()
    made = 3 if modes[1] == "sync" else 3 * second[0]
    assert set(after.versions) == {heritage.updates + made}, "every gradient is taken, under the next number"


@pytest.mark.parametrize("workers", [1, 3])
def test_learners_get_and_give_what_servers_have(workers: int) -> None:
    fleet = learned(workers=workers, servers=2, mode="sync")
    heritage = inherited(fleet)
    states = [handover.for_learner(heritage, rank) for rank in range(3)]
    assert [state["counters"][1] for state in states] == [5, 5, 5]
    assert states[0]["epoch"] == heritage.epoch + 1
    assert states[1]["published"] is None, "the first speaks for all"
    back = handover.of_learners(states)
    renewed = Fleet(workers=2, servers=3, mode="sync")
    handed_on(back, renewed)
    np.testing.assert_array_equal(renewed.parameters, fleet.parameters)
