"""Streams in shared memory against a list: ends that die at any point, views, wake-ups, restored messages."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core import failpoints
from qfleet.core.errors import CheckpointError, QfleetError
from qfleet.core.types import Priorities
from qfleet.core.waiting import Waiter
from qfleet.runtime import memory
from qfleet.runtime.streams import StreamReceiver, StreamSender, create_stream, desert, hold


@pytest.fixture(autouse=True)
def nothing_armed() -> Iterator[None]:
    yield
    failpoints.arm("", "test")


def message(number: int, size: int = 3) -> Priorities:
    return Priorities(np.arange(size) + number, np.zeros(0, np.int64), np.full((size, 3), number, np.float32))


def assert_same(got: Priorities, expected: Priorities) -> None:
    np.testing.assert_array_equal(got.index, expected.index)
    np.testing.assert_array_equal(got.priority, expected.priority)


class Reopening:
    """A stream whose ends can be dropped and opened anew, beside a list that says what must come."""

    def __init__(self, folder: Path, capacity: int, views: bool) -> None:
        self.stem, self.capacity, self.views = folder / "edge", capacity, views
        create_stream(self.stem, capacity)
        self.sent: list[Priorities] = []
        self.taken = 0
        self.new_sender()
        self.new_receiver()

    def new_sender(self) -> None:
        self.sender = StreamSender(self.stem)

    def new_receiver(self) -> None:
        self.receiver = StreamReceiver(self.stem, self.views)
        self.held: list[Priorities] = []

    def send(self, size: int) -> None:
        assert self.sender.ready() == (len(self.sent) - self.taken < self.capacity)
        if self.sender.ready():
            new = message(len(self.sent), size)
            self.sender.send(new)
            self.sent.append(new)

    def die_sending(self, size: int, where: str) -> None:
        """The sender dies in the middle: only a cursor that moved makes the message one."""
        if self.sender.ready():
            failpoints.arm(f"channel.{where}:raise@1", "test")
            with pytest.raises(RuntimeError, match="failpoint"):
                self.sender.send(message(-1 if where != "after_send" else len(self.sent), size))
            failpoints.arm("", "test")
            if where == "after_send":
                self.sent.append(message(len(self.sent), size))
            self.new_sender()

    def receive(self) -> None:
        got, position = self.receiver.receive(), self.taken + len(self.held)
        assert (got is None) == (position == len(self.sent))
        if got is not None:
            assert_same(got, self.sent[position])
            self.held.append(got)

    def acknowledge(self) -> None:
        for number, got in enumerate(self.held, self.taken):
            assert_same(got, self.sent[number])  # still whole, also where it lies in the slot
        self.receiver.acknowledge()
        self.taken, self.held = self.taken + len(self.held), []

    def die_acknowledging(self) -> None:
        if self.held:
            failpoints.arm("channel.before_ack:raise@1", "test")
            with pytest.raises(RuntimeError, match="failpoint"):
                self.receiver.acknowledge()
            failpoints.arm("", "test")
            self.new_receiver()


SIZES = st.integers(0, 2000)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("send"), SIZES),
        st.tuples(st.just("send"), SIZES),
        st.tuples(st.just("die_sending"), SIZES, st.sampled_from(["before_send", "after_write", "after_send"])),
        st.sampled_from(["receive", "receive", "acknowledge", "die_acknowledging", "new_sender", "new_receiver"]).map(
            lambda name: (name,)
        ),
    ),
    max_size=60,
)


@given(capacity=st.integers(1, 4), views=st.booleans(), moves=MOVES)
@settings(deadline=None, max_examples=150)
def test_nothing_is_lost_doubled_or_reordered_however_often_ends_are_opened_anew(
    capacity: int, views: bool, moves: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        stream = Reopening(Path(name), capacity, views)
        for move, *arguments in moves:
            getattr(stream, move)(*arguments)
        stream.sender.close()
        stream.new_receiver()
        while not stream.receiver.exhausted():
            stream.receive()
            stream.acknowledge()
        assert stream.taken == len(stream.sent)


def test_views_lie_in_the_slot_and_copies_do_not(tmp_path: Path) -> None:
    stream = Reopening(tmp_path, 2, views=True)
    for views, later in ((True, 2), (False, 2)):
        stream.views = views
        stream.new_receiver()
        stream.send(1000)
        stream.receive()
        (seen,) = stream.held
        number = seen.priority[0, 0]
        stream.acknowledge()
        for _ in range(later):
            stream.send(1000)
            stream.receive()
            stream.acknowledge()
        assert seen.priority[0, 0] == (number + later if views else number), "a slot is used again"


def test_more_rings_than_a_pipe_holds_do_not_block_and_none_is_lost(tmp_path: Path) -> None:
    stream = Reopening(tmp_path, 2000, views=False)
    for _ in range(1 << 16):
        stream.sender._bell.ring()
    for _ in range(2000):
        stream.send(1)
    for _ in range(2001):
        stream.receive()
    assert rang(stream.receiver, 0)
    assert not rang(stream.receiver, 0), "an empty stream can be waited on"
    stream.acknowledge()
    assert stream.sender.ready()
    stream.send(1)
    assert rang(stream.receiver, 0)


def rang(end: Any, seconds: float) -> bool:
    """Wait as a process does; returns whether the end rang in time."""
    bell, heard = end.waitable(), []
    watched = SimpleNamespace(fileno=bell.fileno, silence=lambda: (heard.append(True), bell.silence()))
    alarm, _ring = multiprocessing.Pipe(duplex=False)
    Waiter(alarm).wait([watched], seconds)
    return bool(heard)


def test_no_wake_up_is_lost_between_two_threads_that_wait_for_each_other(tmp_path: Path) -> None:
    stream, count, late = Reopening(tmp_path, 1, views=False), 3000, []

    def wait(end: Any) -> None:
        if not rang(end, 5.0):
            late.append(end)

    def produce() -> None:
        for number in range(count):
            while not stream.sender.ready():
                wait(stream.sender)
            stream.sender.send(message(number, 1))

    producer = threading.Thread(target=produce)
    producer.start()
    for number in range(count):
        while (got := stream.receiver.receive()) is None:
            wait(stream.receiver)
        assert got.index[0] == number
        stream.receiver.acknowledge()
    producer.join()
    assert late == []


def test_idle_end_waits_without_spinning(tmp_path: Path) -> None:
    stream = Reopening(tmp_path, 1, views=False)
    stream.send(1)
    stream.receive()
    stream.acknowledge()
    assert stream.receiver.receive() is None
    assert rang(stream.receiver, 0.05), "for what was received without waiting"
    began = time.monotonic()
    assert not rang(stream.receiver, 0.05)
    assert time.monotonic() - began >= 0.05


def test_restored_messages_come_before_those_of_roles_that_speak_while_they_are_built(tmp_path: Path) -> None:
    stream = Reopening(tmp_path, 3, views=False)
    stream.sender.send(message(10, 500))
    stream.receiver.load([message(1, 2000), message(2, 5)])
    assert not stream.sender.ready()
    assert [stream.receiver.receive().priority[0, 0] for _ in range(3)] == [1, 2, 10]
    stream.receiver.acknowledge()
    for number in range(3):  # the sender must see that its slots were written by another
        stream.sender.send(message(number, 3000))
        assert_same(stream.receiver.receive(), message(number, 3000))
        stream.receiver.acknowledge()


def test_messages_are_restored_once_though_their_receiver_died_of_it(tmp_path: Path) -> None:
    stream = Reopening(tmp_path, 4, views=False)
    stream.sender.send(message(10))
    for _ in range(2):  # a role that dies while others are restored is told to do so again
        stream.new_receiver()
        stream.receiver.load([message(1), message(2)])
    assert [waiting.priority[0, 0] for waiting in stream.receiver.state()] == [1, 2, 10]


def test_lack_of_room_for_a_message_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_stream(tmp_path / "edge", 1)
    sender = StreamSender(tmp_path / "edge", "actor.envs")

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory.os, "posix_fallocate", full)
    with pytest.raises(QfleetError, match=r"one more message takes 0.0 MB and .* or lower actor.envs"):
        sender.send(message(1))


def test_more_messages_than_a_stream_holds_are_not_restored(tmp_path: Path) -> None:
    stream = Reopening(tmp_path, 1, views=False)
    with pytest.raises(CheckpointError, match="capacity 1 cannot take up 2"):
        stream.receiver.load([message(1), message(2)])


@given(st.integers(1, 4), st.lists(st.sampled_from(["send", "take", "hold 0", "hold 1", "release"]), max_size=30))
@settings(max_examples=40, deadline=None)
def test_a_stream_that_is_held_seems_full_after_so_many_more_messages(capacity: int, story: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stem = Path(folder) / "edge"
        create_stream(stem, capacity)
        sender, receiver = StreamSender(stem), StreamReceiver(stem)
        sent, taken, most = 0, 0, None
        for what in story:
            if what == "send":
                assert sender.ready() == (sent - taken < capacity and (most is None or sent < most))
                if sender.ready():
                    sender.send(message(sent))
                    sent += 1
            elif what == "take":
                taken += receiver.receive() is not None
                receiver.acknowledge()
            else:
                more = None if what == "release" else int(what[-1])
                most = None if more is None else sent + more
                hold(stem, more)
        assert taken <= sent == sender.sent()


def test_what_was_asked_for_before_a_stream_was_held_may_still_be_sent(tmp_path: Path) -> None:
    """A draw goes to all ranks or to none: whoever found room for it sends all of its parts."""
    create_stream(tmp_path / "edge", 2)
    sender = StreamSender(tmp_path / "edge")
    assert sender.ready()
    hold(tmp_path / "edge", 0)
    sender.send(message(0))
    assert not sender.ready()


def test_who_has_left_can_come_back(tmp_path: Path) -> None:
    create_stream(tmp_path / "edge", 2)
    sender = StreamSender(tmp_path / "edge")
    desert(tmp_path / "edge")
    assert sender.deserted()
    desert(tmp_path / "edge", False)
    assert not sender.deserted()
