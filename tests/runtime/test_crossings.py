"""Edges between two nodes, without a network: questions and parcels that are lost, late, doubled or out of order."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_roles import Consumer, Handles, Producer, Settings, item, pipeline, weights

from qfleet.runtime.channels import SharedCounter, edge_stem, lay_out
from qfleet.runtime.crossings import Depot, Imports, Parcel, Question, draw_map
from qfleet.runtime.graph import Graph
from qfleet.runtime.latest import LatestPublisher, LatestSubscriber
from qfleet.runtime.streams import StreamReceiver, StreamSender, catch_up, create_stream, reopen

EDGE = Imports(streams=("edge",), values=("news",), cells={"steps": (0,)})


class TwoNodes:
    """A sender and a publisher on one node, a receiver and a subscriber on another, and a carrier that misbehaves."""

    def __init__(self, folder: Path, capacity: int) -> None:
        graph = Graph(streams={"edge": capacity}, latest_values={"news": 1}, counters={"steps": 2})
        self.folders = [folder / "here", folder / "there"]
        for place in self.folders:
            place.mkdir()
            lay_out(graph, place)
        here, there = self.folders
        self.source, self.goal = Depot(here, {}, {"there": EDGE}), Depot(there, {"here": EDGE}, {})
        self.publisher, self.subscriber = LatestPublisher(here / "news"), LatestSubscriber(there / "news")
        self.counted, self.total = SharedCounter(here / "steps", 0), SharedCounter(there / "steps", 1)
        self.capacity, self.sent, self.came = capacity, 0, 0
        self.published = self.seen = self.steps = 0
        self.questions: list[Question] = []
        self.parcels: list[Parcel] = []
        self.new_sender()
        self.new_receiver()

    def new_sender(self) -> None:
        """The sending role died and is begun anew."""
        self.sender = StreamSender(self.folders[0] / "edge")

    def new_receiver(self) -> None:
        """The receiving role died: what it had not acknowledged comes again."""
        self.receiver, self.held = StreamReceiver(self.folders[1] / "edge"), 0

    def send(self) -> None:
        assert self.sent - self.came <= self.capacity
        if self.sender.ready():
            assert self.sent - self.came < self.capacity, "the stream holds more than its capacity"
            self.sender.send(item(self.sent, 5 + self.sent % 300))
            self.sent += 1
        self.counted.add(1)
        self.steps += 1

    def publish(self) -> None:
        self.published += 1
        self.publisher.publish(weights(self.published, 10 + self.published))

    def receive(self) -> None:
        got = self.receiver.receive()
        if got is not None:
            np.testing.assert_array_equal(
                got.priority, item(self.came + self.held, 5 + (self.came + self.held) % 300).priority
            )
            self.held += 1

    def acknowledge(self) -> None:
        self.receiver.acknowledge()
        self.came, self.held = self.came + self.held, 0

    def look(self) -> None:
        value = self.subscriber.latest()
        if value is not None:
            assert value.version.number > self.seen
            self.seen = value.version.number
        assert self.total.total() <= self.steps

    def ask(self) -> None:
        self.questions.append(self.goal.question("here"))

    def answer(self, which: int) -> None:
        if self.questions:
            self.parcels.append(self.source.answer("there", self.questions[which % len(self.questions)]))

    def arrive(self, which: int) -> None:
        if self.parcels:
            known = self.total.total()
            self.goal.take_in("here", self.parcels[which % len(self.parcels)])
            assert self.total.total() >= known, "a counter went back"

    def carry(self) -> None:
        self.goal.take_in("here", self.source.answer("there", self.goal.question("here")))


MOVES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "send",
                "send",
                "publish",
                "receive",
                "receive",
                "acknowledge",
                "look",
                "ask",
                "carry",
                "new_sender",
                "new_receiver",
            ]
        ).map(lambda name: (name,)),
        st.tuples(st.sampled_from(["answer", "arrive"]), st.integers(0, 30)),
    ),
    max_size=80,
)


@given(capacity=st.integers(1, 4), moves=MOVES)
@settings(deadline=None, max_examples=120)
def test_trap_16_nothing_is_lost_doubled_or_reordered_whatever_becomes_of_calls_and_roles(
    capacity: int, moves: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        nodes = TwoNodes(Path(name), capacity)
        for move, *arguments in moves:
            getattr(nodes, move)(*arguments)
        nodes.sender.close()
        nodes.carry()
        while not nodes.receiver.exhausted():
            nodes.receive()
            nodes.acknowledge()
            nodes.carry()
        assert nodes.came == nodes.sent
        nodes.look()
        assert (nodes.seen, nodes.total.total()) == (nodes.published, nodes.steps)


def test_an_old_question_asks_for_nothing_that_is_gone(tmp_path: Path) -> None:
    nodes = TwoNodes(tmp_path, 1)
    nodes.ask()
    for _ in range(3):
        nodes.send()
        nodes.carry()
        nodes.receive()
        nodes.acknowledge()
        nodes.carry()
    late = nodes.source.answer("there", nodes.questions[0])
    assert (late.heeded, late.streams) == (False, {})
    assert nodes.source.answer("there", nodes.goal.question("here")).heeded


def test_restored_messages_take_room_from_the_sender_on_the_other_node(tmp_path: Path) -> None:
    nodes = TwoNodes(tmp_path, 3)
    nodes.receiver.load([item(7, 2), item(8, 2)])
    for number in range(3):
        nodes.sender.send(item(number, 2))  # before anybody could tell it
    nodes.carry()
    assert not nodes.sender.ready()
    came = []
    for _ in range(5):
        came.append(int(nodes.receiver.receive().index[0]))
        nodes.receiver.acknowledge()
        nodes.carry()
    assert came == [7, 8, 0, 1, 2]
    assert nodes.sender.ready()


def test_a_question_is_answered_when_there_is_news_and_else_when_the_time_is_up(tmp_path: Path) -> None:
    nodes = TwoNodes(tmp_path, 2)
    for news in (nodes.send, nodes.publish, nodes.sender.close):
        waiting = threading.Thread(target=nodes.source.wait, args=("there", nodes.goal.question("here"), 60.0))
        waiting.start()
        news()
        waiting.join(20.0)
        assert not waiting.is_alive(), news
        nodes.carry()
    began = time.monotonic()
    nodes.source.wait("there", nodes.goal.question("here"), 0.05)
    assert time.monotonic() - began >= 0.05


def test_a_map_has_every_edge_once_and_all_counts_at_the_callers_node() -> None:
    graph = pipeline(1)
    graph.counter("messages")
    drawn = draw_map(graph, {"producer-0": "there", "relay-0": "here", "consumer-0": "elsewhere"}, "here")
    assert drawn.imports["here"]["there"] == Imports(("first",), (), {"messages": (0,)})
    assert drawn.imports["elsewhere"]["here"] == Imports(("second",), (), {"messages": (0, 2)})
    assert drawn.imports["there"]["here"].cells == {"messages": (1, 2)}
    assert "elsewhere" not in drawn.imports["there"]
    assert drawn.exports["there"] == {"here": drawn.imports["here"]["there"]}
    assert drawn.edges == {"here": {"first", "second"}, "there": {"first"}, "elsewhere": {"second"}}


def test_a_value_goes_to_each_node_that_has_a_reader() -> None:
    graph = Graph()
    graph.add(Producer, Settings(), Handles(publisher=graph.publisher("news")))
    for _ in range(2):
        graph.add(Consumer, Settings(), Handles(subscriber=graph.subscriber("news")))
    drawn = draw_map(graph, {"producer-0": "here", "consumer-0": "there", "consumer-1": "there"}, "here")
    assert drawn.imports["there"]["here"].values == ("news",)
    assert drawn.imports["here"] == {}


def test_what_finds_no_room_waits_at_its_sender(tmp_path: Path) -> None:
    create_stream(edge_stem(tmp_path, "edge"), 1)
    goal = Depot(tmp_path, {"here": Imports(streams=("edge",))}, {})
    frames = [np.frombuffer(bytes(64), np.uint8)] * 3
    goal.take_in("here", Parcel(True, {"edge": (0, frames, True)}, {}, {}))
    assert goal.question("here").streams["edge"] == (1, 0, False), "the end is not there before all messages are"


class Moved:
    """A stream whose receiver was on one node, then on another; its sender stays where it is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.places = folder, 0
        (folder / "here").mkdir()
        create_stream(edge_stem(folder / "here", "edge"), 3)
        self.sender = StreamSender(folder / "here" / "edge")
        self.sent = 0

    def elsewhere(self) -> tuple[Depot, Depot, StreamReceiver]:
        """Let the receiver be on a new node from now on."""
        self.places += 1
        there = self.folder / f"there-{self.places}"
        there.mkdir()
        create_stream(edge_stem(there, "edge"), 3)
        first = reopen(self.folder / "here" / "edge")
        edge = Imports(streams=("edge",))
        source = Depot(self.folder / "here", {}, {"there": edge})
        return source, Depot(there, {"here": edge}, {}, {"edge": first}), StreamReceiver(there / "edge")

    def send(self) -> None:
        self.sender.send(item(self.sent, 5))
        self.sent += 1


def carry(source: Depot, goal: Depot) -> None:
    goal.take_in("here", source.answer("there", goal.question("here")))


def taken(receiver: StreamReceiver) -> int:
    """Receive and acknowledge all that is there; return how much that was."""
    count = 0
    while receiver.receive() is not None:
        count += 1
    receiver.acknowledge()
    return count


def test_a_receiver_that_moves_goes_on_with_what_it_had_not_acknowledged(tmp_path: Path) -> None:
    moved = Moved(tmp_path)
    source, goal, receiver = moved.elsewhere()
    for _ in range(3):
        moved.send()
    carry(source, goal)
    assert receiver.receive() is not None
    receiver.acknowledge()
    carry(source, goal)  # tells that one was taken
    moved.send()
    carry(source, goal)
    source.let_go(["edge"])  # its node is lost, with three messages that were not acknowledged
    late = goal.question("here")
    source, goal, receiver = moved.elsewhere()
    carry(source, goal)
    np.testing.assert_array_equal(receiver.receive().priority, item(1, 5).priority)
    receiver.acknowledge()
    assert taken(receiver) == 2
    carry(source, goal)
    assert moved.sender.state() == 0, "all of its room is free again"
    assert late.streams["edge"][1] == 1


def test_what_a_node_still_asks_of_a_stream_that_is_elsewhere_now_changes_nothing(tmp_path: Path) -> None:
    moved = Moved(tmp_path)
    former, old, _ = moved.elsewhere()
    for _ in range(2):
        moved.send()
    carry(former, old)
    stale = old.question("here")
    former.let_go(["edge"])
    source, goal, receiver = moved.elsewhere()
    carry(source, goal)
    assert taken(receiver) == 2
    carry(source, goal)
    assert former.answer("there", stale).streams == {}
    former.wait("there", stale, 0.01)
    assert moved.sender.state() == 0, "the old standing would have taken both messages back"


def test_messages_of_a_restored_run_that_are_lost_with_a_node_leave_no_gap(tmp_path: Path) -> None:
    moved = Moved(tmp_path)
    source, goal, receiver = moved.elsewhere()
    receiver.load([item(7, 5), item(8, 5)])
    carry(source, goal)
    assert moved.sender.state() == 2, "they take the sender's room"
    reopen(tmp_path / "here" / "edge")
    moved.send()
    here = StreamReceiver(tmp_path / "here" / "edge")
    np.testing.assert_array_equal(here.receive().priority, item(0, 5).priority)


@pytest.mark.parametrize(
    ("told", "peer", "left"), [(0, 3, 0), (0, 2, 1), (1, 0, 2), (3, 3, 0)], ids=["all", "some", "behind", "level"]
)
def test_a_receiver_whose_node_is_lost_leaves_out_what_its_peer_has_taken(
    told: int, peer: int, left: int, tmp_path: Path
) -> None:
    """Its stream seemed full of batches that all had learned from: no further one came, and its peers had none."""
    for edge, count in (("own", told), ("peer", peer)):
        create_stream(edge_stem(tmp_path, edge), 3)
        sender, receiver = StreamSender(tmp_path / edge), StreamReceiver(tmp_path / edge)
        for number in range(3):
            sender.send(item(number, 5))
        for _ in range(count):
            receiver.receive()
        receiver.acknowledge()
    catch_up(tmp_path / "own", tmp_path / "peer")
    assert StreamSender(tmp_path / "own").state() == left
    assert taken(StreamReceiver(tmp_path / "own")) == left
