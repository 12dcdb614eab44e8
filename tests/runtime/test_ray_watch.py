"""What is known of a cluster whose head falls silent: what was seen last, at once, and after a while that it ended."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

pytest.importorskip("ray")

from qfleet.runtime import ray_cluster, ray_watch
from qfleet.runtime.ray_cluster import Site
from qfleet.runtime.ray_watch import ClusterWatch

HERE, OTHER = Site("a", "head", 4.0, 1e9), Site("b", "worker", 8.0, 1e9)


@dataclass
class Head:
    """Answers with its nodes, unless it is silent."""

    nodes: list[Site] = field(default_factory=lambda: [HERE])
    speaks: threading.Event = field(default_factory=threading.Event)
    asked: int = 0

    def sites(self, first: str) -> list[Site]:
        self.asked += 1
        assert self.speaks.wait(60)
        if not self.nodes:
            raise RuntimeError("Ray was left")
        return self.nodes


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    one = Head()
    one.speaks.set()
    monkeypatch.setattr(ray_cluster, "here", lambda: HERE.id)
    monkeypatch.setattr(ray_cluster, "sites", one.sites)
    monkeypatch.setattr(ray_cluster, "draining", lambda: {"b": "spot notice"} if OTHER in one.nodes else {})
    monkeypatch.setattr(ray_cluster, "dead_part", lambda: "")
    monkeypatch.setattr(ray_watch, "_raylet", lambda: None)
    yield one
    one.speaks.set()


def test_what_is_asked_for_is_as_new_as_the_question(head: Head) -> None:
    watch = ClusterWatch()
    for nodes in ([HERE, OTHER], [HERE], [HERE, OTHER]) * 5:
        head.nodes = nodes
        assert watch.sites() == nodes
        assert watch.draining() == ({"b": "spot notice"} if OTHER in nodes else {})
    assert watch.ended == ""
    watch.close()


def test_a_silent_head_holds_nobody_up_is_missed_after_a_while_and_may_come_back(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_watch, "_FRESH_S", 0.3)
    monkeypatch.setattr(ray_watch, "HEAD_S", 1.0)
    watch = ClusterWatch()
    head.speaks.clear()
    assert watch.sites() == [HERE]
    assert watch.silent
    asked, began = head.asked, time.monotonic()
    for _ in range(100):
        assert watch.sites() == [HERE]
    assert head.asked == asked, "one question is enough for a head that does not answer"
    while not watch.ended:
        assert time.monotonic() < began + 30
    assert re.fullmatch(r"the head of the Ray cluster has not answered for \d+ s", watch.ended)
    head.nodes = [HERE, OTHER]
    head.speaks.set()
    while watch.ended:
        assert time.monotonic() < began + 30
    assert watch.sites() == [HERE, OTHER]
    watch.close()


def test_a_process_that_was_stopped_itself_does_not_take_that_for_silence(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = ClusterWatch()
    head.speaks.clear()
    watch.sites()
    assert watch.ended == ""
    later = time.monotonic() + 1000.0
    with monkeypatch.context() as clock:
        clock.setattr(ray_watch.time, "monotonic", lambda: later)
        assert (watch.silent, watch.ended) == (True, "")
    head.speaks.set()
    watch.close()


def test_a_look_that_fails_leaves_what_was_seen_before(head: Head) -> None:
    watch = ClusterWatch()
    head.nodes = []
    assert watch.sites() == [HERE]
    assert watch.ended == ""
    watch.close()


def test_a_head_at_which_every_look_fails_is_missed_as_a_silent_one_is(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_watch, "_FRESH_S", 0.3)
    monkeypatch.setattr(ray_watch, "HEAD_S", 0.6)
    watch, began = ClusterWatch(), time.monotonic()
    head.nodes = []
    while not watch.ended:
        assert time.monotonic() < began + 30
        assert watch.sites() == [HERE]
    head.nodes = [HERE, OTHER]
    while watch.ended:
        assert time.monotonic() < began + 30
    assert watch.sites() == [HERE, OTHER]
    watch.close()
