"""The ends of edges, without processes: shared memory and mail against a plain queue, torn reads, repeated calls."""

from __future__ import annotations

import socket
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

from qfleet.core.types import Notice, Priorities
from qfleet.runtime import framing
from qfleet.runtime.channels import Ports, SharedCounter, edge_stem
from qfleet.runtime.framing import Frame
from qfleet.runtime.graph import Graph
from qfleet.runtime.inline import LocalCells, LocalCounter
from qfleet.runtime.latest import LatestPublisher, LatestSubscriber, create_latest
from qfleet.runtime.mail import CALLER, MailReceiver, MailRoom, MailSender, find_routes
from qfleet.runtime.memory import create
from qfleet.runtime.streams import Bell, StreamReceiver, StreamSender, create_stream


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
    ours, theirs = socket.socketpair()
    create_stream(folder / "edge", capacity)
    return StreamSender(Bell(ours), folder / "edge"), StreamReceiver(Bell(theirs), folder / "edge", hold=False)


def mail_stream(folder: Path, capacity: int) -> tuple[Any, Any]:
    """Every call is made twice, as a carrier may that lost a reply."""
    sender: Any = None

    def deliver(sequence: int, frame: Any) -> None:
        receiver.put(sequence, frame)
        receiver.put(sequence, frame)

    def acknowledge(taken: int) -> None:
        sender.taken = max(sender.taken, taken)

    receiver = MailReceiver(acknowledge)
    sender = MailSender(capacity, deliver)
    return sender, receiver


@pytest.mark.parametrize("make", [shared_stream, mail_stream])
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
    assert len(list(tmp_path.iterdir())) == 2, "the cells and the one slot"


def test_end_whose_peer_is_gone_is_silent_and_is_not_waited_on(tmp_path: Path) -> None:
    sender, receiver = shared_stream(tmp_path, 1)
    sender.send(message(1, 5))
    receiver._bell._connection.close()
    assert not sender.ready()
    sender.waitable().silence()
    assert sender.waitable() is None, "waiting on it would spin"
    (tmp_path / "other").mkdir()
    sender, receiver = shared_stream(tmp_path / "other", 1)
    sender._bell._connection.close()
    assert receiver.receive() is None
    assert not receiver.exhausted(), "a stream that broke is not one that ended"
    receiver.waitable().silence()
    assert receiver.waitable() is None


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


def mail_room(graph: Graph) -> tuple[MailRoom, deque[Any]]:
    """Return the mail room of a caller who holds every end, and its calls, which wait to be carried."""
    calls: deque[Any] = deque()
    routes = find_routes(graph)

    def post(holder: str, method: str, *arguments: Any) -> None:
        calls.append((method, arguments))

    return MailRoom(CALLER, routes, post, lambda buffer: buffer), calls


def test_trap_14_slow_subscriber_has_one_value_on_its_way_and_then_gets_the_newest() -> None:
    graph = Graph()
    publisher_end: Any = graph.publisher("news")
    subscriber_end: Any = graph.subscriber("news")
    room, calls = mail_room(graph)
    publisher, subscriber = room.open(publisher_end), room.open(subscriber_end)
    for number in range(1, 50):
        publisher.publish(weights(number, 3))
        assert len(calls) == 1
    while calls:
        method, arguments = calls.popleft()
        getattr(room, method)(*arguments)
    assert subscriber.latest().version.number == 49
    assert subscriber.latest() is None


def test_trap_16_messages_that_come_twice_or_out_of_order_are_put_right() -> None:
    taken: list[int] = []
    receiver = MailReceiver(taken.append)
    frames = [Frame(Notice("a", n, "b", "c")).to_buffer() for n in range(4)]
    for sequence in (1, 0, 1, 0):
        receiver.put(sequence, frames[sequence])
    receiver.put(4, None)
    assert [receiver.receive().index, receiver.receive().index] == [0, 1]
    receiver.put(0, frames[0])
    assert receiver.receive() is None
    assert not receiver.exhausted()
    receiver.put(3, frames[3])
    receiver.put(2, frames[2])
    assert [receiver.receive().index, receiver.receive().index] == [2, 3]
    assert receiver.exhausted()
    assert taken == [1, 2, 3, 4]


@pytest.mark.parametrize(("asking", "views", "room"), [(False, False, False), (True, True, False), (True, False, True)])
def test_a_reply_gives_its_room_back_at_once_and_nothing_else_does(
    asking: bool, views: bool, room: bool, tmp_path: Path
) -> None:
    """An actor that asks again within the step that used a reply must be answered within it."""
    graph = Graph()
    ends = graph.stream("edge", 1, views=views, asking=asking)
    ours, theirs = socket.socketpair()
    create_stream(edge_stem(tmp_path, "edge"), 1)
    ports = Ports(tmp_path, {("edge", "sender"): ours, ("edge", "receiver"): theirs})
    sender, receiver = (ports.open(end) for end in ends)
    sender.send(message(1, 5))
    assert receiver.receive() is not None
    assert sender.ready() == room
    receiver.acknowledge()
    assert sender.ready()
