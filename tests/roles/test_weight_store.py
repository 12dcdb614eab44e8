"""An actor's end of packed weights: which keyframe it needs, when that comes late, and what it keeps in a state."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_cases import NETWORK, PLAIN_AGENT
from role_cases import SPEC

from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import build_network
from qfleet.core import codec
from qfleet.core.errors import QfleetError
from qfleet.core.types import Version
from qfleet.parallel.packing import Packer, Unpacker
from qfleet.parallel.packing_config import DeltaWeights
from qfleet.roles.weight_store import WeightReader, snapshot

FORM = DeltaWeights(density=0.2, keyframe_period=3)


class Late:
    """A latest value that comes when it is told to: a later one may overtake it."""

    def __init__(self) -> None:
        self.sent: Any = None
        self._arrived: Any = None

    def deliver(self) -> None:
        self._arrived, self.sent = self.sent or self._arrived, None

    def latest(self) -> Any:
        arrived, self._arrived = self._arrived, None
        return arrived

    def waitable(self) -> None:
        return None


class Learner:
    """Publishes weights that move."""

    def __init__(self) -> None:
        self.flat, self._rng = network(), np.random.default_rng(0)
        self.packer, self._reader = Packer(FORM, len(self.flat.parameters)), Unpacker(len(self.flat.parameters))
        self.shadows: dict[int, bytes] = {-1: self.flat.to_numpy().tobytes()}
        """What actors have, by version."""

    def publish(self, number: int) -> tuple[Any, Any]:
        values = self.flat.to_numpy()
        self.flat.load_numpy(values + 0.1 * self._rng.normal(size=len(values)).astype(np.float32))
        keyframe, message = codec.roundtrip(self.packer.pack(snapshot(self.flat, Version(0, number), 0)))
        if keyframe is not None:
            self._reader.remember(keyframe)
        self.shadows[number] = self._reader.verified(message).tobytes()
        return keyframe, message


def network() -> FlatParameters:
    return FlatParameters(build_network(NETWORK, PLAIN_AGENT, SPEC, seed=0))


@settings(max_examples=60, deadline=None)
@given(events=st.lists(st.sampled_from(["publish", "weights", "keyframes", "read"]), max_size=40))
def test_an_actor_has_a_published_version_whatever_comes_late_and_the_newest_in_the_end(events):
    learner, edge, keyframes = Learner(), Late(), Late()
    flat = network()
    reader, number = WeightReader(flat, edge, keyframes), -1
    reader.version = Version(0, -1)
    for event in [*events, "publish", "weights", "keyframes", "read"]:
        if event == "publish":
            number += 1
            keyframe, edge.sent = learner.publish(number)
            keyframes.sent = keyframe or keyframes.sent
        elif event == "read":
            before = reader.version
            assert reader.refresh() == (reader.version != before)
            assert reader.version >= before
        else:
            {"weights": edge, "keyframes": keyframes}[event].deliver()
        assert flat.to_numpy().tobytes() == learner.shadows[reader.version.number]
    assert reader.version == Version(0, number)


def test_a_damaged_message_changes_nothing():
    learner, edge, keyframes = Learner(), Late(), Late()
    flat = network()
    reader, before = WeightReader(flat, edge, keyframes), flat.to_numpy()
    keyframes.sent, _ = learner.publish(0)
    _, message = learner.publish(1)
    message.payload[-1].zero_()
    edge.sent = message
    edge.deliver()
    keyframes.deliver()
    with pytest.raises(QfleetError, match="arrived damaged"):
        reader.refresh()
    assert np.array_equal(flat.to_numpy(), before)
    assert reader.version == Version()


@pytest.mark.parametrize("late", [False, True])
def test_a_state_holds_the_keyframe_and_weights_that_wait_for_theirs(late):
    learner, edge, keyframes = Learner(), Late(), Late()
    flats = [network(), network()]
    reader, resumed = (WeightReader(flat, edge, keyframes) for flat in flats)
    for number in range(4):  # the last of which has another keyframe
        keyframe, edge.sent = learner.publish(number)
        keyframes.sent = keyframe or keyframes.sent
        edge.deliver()
        if number < 3 or not late:
            keyframes.deliver()
        reader.refresh()
    assert reader.version.number == (2 if late else 3)
    resumed.load_state_dict(codec.roundtrip(reader.state_dict()))
    assert flats[0].to_numpy().tobytes() == flats[1].to_numpy().tobytes()
    if late:
        keyframes.deliver()
    else:
        edge.sent = learner.publish(4)[1]
        edge.deliver()
    assert resumed.refresh()
    assert flats[1].to_numpy().tobytes() == learner.shadows[resumed.version.number]


def test_weights_that_wait_survive_the_reuse_of_the_memory_they_came_in():
    learner, edge, keyframes = Learner(), Late(), Late()
    flat = network()
    reader = WeightReader(flat, edge, keyframes)
    keyframes.sent, message = learner.publish(0)
    room = np.array([1.0, 2.0], np.float32)
    edge.sent = dataclasses.replace(message, buffers=room)
    edge.deliver()
    assert not reader.refresh()
    room[:] = 7.0
    assert reader._early is not None
    assert reader._early.buffers.tolist() == [1.0, 2.0]
