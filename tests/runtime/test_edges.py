"""The ends of edges, without processes: shared memory, on one node or two, against a plain queue, and torn reads."""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_roles import weights

from qfleet.core.types import Priorities
from qfleet.runtime import framing
from qfleet.runtime.channels import Ports, SharedCounter, edge_stem
from qfleet.runtime.crossings import Depot, Imports
from qfleet.runtime.framing import Frame
from qfleet.runtime.graph import Graph
from qfleet.runtime.inline import LocalCells, LocalCounter
from qfleet.runtime.latest import LatestPublisher, LatestSubscriber, create_latest
from qfleet.runtime.memory import create
from qfleet.runtime.streams import StreamReceiver, StreamSender, create_stream


def message(number: int, size: int) -> Priorities:
    return Priorities(np.arange(size) + number, np.zeros(0, np.int64), np.full((size, 3), number, np.float32))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["<f8", "<f4", "|u1", "|b1", "<i8", "<f2"]),
            st.lists(st.integers(0, 5), max_size=3),
            st.booleans(),
        ),
        max_size=5,
    ),
    st.text(max_size=200),
)
@settings(deadline=None, max_examples=100)
def test_frame_returns_what_it_was_given(shapes: list[tuple[str, list[int], bool]], text: str) -> None:
    rng = np.random.Generator(np.random.PCG64(len(text)))
    arrays = [np.asarray(rng.random(shape) * 200, dtype) for dtype, shape, _ in shapes]
    arrays = [a.T if turned else a for a, (_, _, turned) in zip(arrays, shapes, strict=True)]
    came = framing.read(framing.copy(Frame({"text": text, "arrays": arrays}).to_buffer()))
    assert came["text"] == text
    for sent, got in zip(arrays, came["arrays"], strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert got.flags.c_contiguous
        assert got.flags.aligned
        assert got.flags.writeable


@given(st.lists(st.tuples(st.sampled_from(["<f4", ">f4", "<i4", "|b1"]), st.integers(0, 3)), min_size=1, max_size=20))
@settings(deadline=None, max_examples=50)
def test_frames_one_after_the_other_have_each_their_own_layout(forms: list[tuple[str, int]]) -> None:
    buffer = framing.empty(4096)
    for number, (dtype, size) in enumerate(forms):
        sent = Priorities(np.arange(size), np.full((size, 2), number, dtype), np.full(3 - size, number, np.float32))
        frame = Frame(sent)
        frame.write(buffer)
        for got in (framing.read(buffer), framing.read(framing.copy(buffer[: frame.nbytes]))):
            for name in ("index", "generation", "priority"):
                np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
                assert getattr(got, name).dtype == getattr(sent, name).dtype


def test_frame_refuses_what_would_lose_its_type() -> None:
    with pytest.raises(TypeError, match="plain number types"):
        Frame(np.zeros(2, np.dtype([("a", "f4")])))


def shared_stream(folder: Path, capacity: int) -> tuple[Any, Any]:
    create_stream(folder / "edge", capacity)
    return StreamSender(folder / "edge"), StreamReceiver(folder / "edge", hold=False)


class Carried:
    """An end of a stream between two nodes: what it says arrives, each call twice, before and after it is used."""

    def __init__(self, end: Any, carry: Callable[[], None]) -> None:
        self._end, self._carry = end, carry

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._carry()
            result = getattr(self._end, name)(*arguments)
            self._carry()
            return result

        return call


def crossing_stream(folder: Path, capacity: int) -> tuple[Any, Any]:
    here, there = folder / "here", folder / "there"
    for place in (here, there):
        place.mkdir()
        create_stream(edge_stem(place, "edge"), capacity)
    crossing = Imports(streams=("edge",))
    source, goal = Depot(here, {}, {"there": crossing}), Depot(there, {"here": crossing}, {})

    def carry() -> None:
        for _ in range(2):  # the second question tells what the first one's parcel has changed
            question = goal.question("here")
            for parcel in (source.answer("there", question), source.answer("there", question)):
                goal.take_in("here", parcel)

    sender, receiver = StreamSender(edge_stem(here, "edge")), StreamReceiver(edge_stem(there, "edge"), hold=False)
    return Carried(sender, carry), Carried(receiver, carry)


@pytest.mark.parametrize("make", [shared_stream, crossing_stream])
@given(
    capacity=st.integers(1, 5),
    moves=st.lists(st.one_of(st.tuples(st.just("send"), st.integers(0, 3000)), st.just(("receive", 0)))),
    cut=st.integers(0, 20),
)
@settings(deadline=None, max_examples=60)
def test_stream_equals_a_bounded_queue_also_over_a_cut(make: Any, capacity: int, moves: Any, cut: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        sender, receiver = make(Path(name), capacity)
        model: deque[tuple[int, int]] = deque()
        for number, (move, size) in enumerate(moves):
            if number == cut:
                states = sender.state(), receiver.state()
                (Path(name) / "again").mkdir()
                sender, receiver = make(Path(name) / "again", capacity)
                sender.load(states[0])
                receiver.load(states[1])
            assert sender.ready() == (len(model) < capacity)
            if move == "send" and sender.ready():
                sender.send(message(number, size))
                model.append((number, size))
            elif move == "send":
                with pytest.raises(RuntimeError, match="full stream"):
                    sender.send(message(number, size))
            else:
                got, expected = receiver.receive(), model.popleft() if model else None
                assert (got is None) == (expected is None)
                if expected is not None:
                    np.testing.assert_array_equal(got.index, message(*expected).index)
                    np.testing.assert_array_equal(got.priority, message(*expected).priority)
        sender.close()
        sender.close()
        while model:
            assert not receiver.exhausted()
            np.testing.assert_array_equal(receiver.receive().index, message(*model.popleft()).index)
        assert receiver.receive() is None
        assert receiver.exhausted()


def test_slots_that_were_outgrown_are_deleted(tmp_path: Path) -> None:
    sender, receiver = shared_stream(tmp_path, 1)
    for size in range(0, 20_000, 1000):
        sender.send(message(1, size))
        assert receiver.receive().index.size == size
    assert len(list(tmp_path.iterdir())) == 4, "the cells, the one slot and two bells"


def test_a_stream_whose_sender_is_gone_is_not_one_that_ended(tmp_path: Path) -> None:
    sender, receiver = shared_stream(tmp_path, 1)
    sender.send(message(1, 5))
    del sender
    assert receiver.receive() is not None
    assert receiver.receive() is None
    assert not receiver.exhausted()


def latest_cells(folder: Path) -> Path:
    create_latest(folder / "edge")
    return folder / "edge"


def test_latest_value_read_by_threads_while_it_is_replaced(tmp_path: Path) -> None:
    stem = latest_cells(tmp_path)
    publisher = LatestPublisher(stem)
    faults: list[str] = []

    def view() -> None:
        subscriber, seen = LatestSubscriber(stem), 0
        while seen < 300:
            value = subscriber.latest()
            if value is None:
                continue
            if value.version.number <= seen or not (value.flat == value.version.number).all():
                faults.append(f"{value.version} after {seen}")
            seen = value.version.number

    viewers = [threading.Thread(target=view) for _ in range(2)]
    for viewer in viewers:
        viewer.start()
    for number in range(1, 301):
        publisher.publish(weights(number, 10_000 + 37 * number))
    for viewer in viewers:
        viewer.join()
    assert faults == []


def test_torn_value_is_not_returned(tmp_path: Path) -> None:
    stem = latest_cells(tmp_path)
    publisher, subscriber = LatestPublisher(stem), LatestSubscriber(stem)
    publisher.publish(weights(1, 1000))
    publisher._writers[1]._buffer[2000] ^= 1  # as if the writer were in the middle of it
    assert subscriber.latest() is None
    publisher._writers[1]._buffer[2000] ^= 1
    assert subscriber.latest().version.number == 1


def test_latest_value_goes_on_under_its_stamp(tmp_path: Path) -> None:
    stem = latest_cells(tmp_path)
    publisher, subscriber = LatestPublisher(stem), LatestSubscriber(stem)
    assert subscriber.latest() is None
    publisher.publish(weights(1, 10))
    publisher.publish(weights(2, 10))
    assert subscriber.latest().version.number == 2
    (tmp_path / "again").mkdir()
    stem = latest_cells(tmp_path / "again")
    publisher_again, seen, unseen = LatestPublisher(stem), LatestSubscriber(stem), LatestSubscriber(stem)
    publisher_again.load(publisher.state())
    seen.load(subscriber.state())
    assert seen.latest() is None
    assert unseen.latest().version.number == 2
    publisher_again.publish(weights(3, 10))
    assert seen.latest().version.number == 3


def shared_cells(folder: Path) -> list[Any]:
    create(folder / "edge", 8 * 3)
    return [SharedCounter(folder / "edge", writer) for writer in range(3)]


def local_cells(folder: Path) -> list[Any]:
    cells = LocalCells()
    last = LocalCounter(cells, 2)
    return [LocalCounter(cells, 0), LocalCounter(cells, 1), last]


@pytest.mark.parametrize("make", [shared_cells, local_cells])
def test_counter_is_the_sum_of_its_writers(make: Callable[[Path], list[Any]], tmp_path: Path) -> None:
    cells = make(tmp_path)
    for writer, cell in enumerate(cells):
        for _ in range(10):
            cell.add(writer + 1)
    assert [cell.total() for cell in cells] == [60, 60, 60]
    assert [cell.own() for cell in cells] == [10, 20, 30]


@pytest.mark.parametrize(("saved", "own"), [([1, 2, 3], [1, 2]), (6, [6, 0])])
def test_local_counter_goes_on_from_its_cells_or_from_the_sum_of_older_checkpoints(saved: Any, own: list[int]) -> None:
    cells = LocalCells()
    counters = [LocalCounter(cells, writer) for writer in range(2)]
    cells.load(saved)
    assert [counter.own() for counter in counters] == own
    assert [counter.total() for counter in counters] == [6, 6]


@pytest.mark.parametrize(("asking", "views", "room"), [(False, False, False), (True, True, False), (True, False, True)])
def test_a_reply_gives_its_room_back_at_once_and_nothing_else_does(
    asking: bool, views: bool, room: bool, tmp_path: Path
) -> None:
    """An actor that asks again within the step that used a reply must be answered within it."""
    graph = Graph()
    ends = graph.stream("edge", 1, views=views, asking=asking)
    create_stream(edge_stem(tmp_path, "edge"), 1)
    ports = Ports(tmp_path)
    sender, receiver = (ports.open(end) for end in ends)
    sender.send(message(1, 5))
    assert receiver.receive() is not None
    assert sender.ready() == room
    receiver.acknowledge()
    assert sender.ready()
