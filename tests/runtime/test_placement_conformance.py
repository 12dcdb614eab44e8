"""What every placement must do alike: inline, strict inline, processes (forked and spawned), Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_roles import (
    Consumer,
    Faulty,
    Handles,
    Painter,
    Producer,
    Relay,
    Settings,
    Stuck,
    Viewer,
    pipeline,
    save,
    weights,
)

from qfleet.core.errors import RoleFailure
from qfleet.runtime.graph import Graph
from qfleet.runtime.inline import InlinePlacement
from qfleet.runtime.processes import ProcessPlacement

Place = Callable[[Graph], Any]
KINDS = ("producer", "relay", "consumer")


HERE = ["inline", "strict", "forkserver", "lockstep"]


def find_place(request: pytest.FixtureRequest) -> Place:
    if request.param == "ray":
        request.getfixturevalue("ray_session")
        from qfleet.runtime.ray import RayPlacement

        return RayPlacement
    places: dict[str, Place] = {
        "inline": InlinePlacement,
        "strict": lambda graph: InlinePlacement(graph, strict=True),
        "forkserver": ProcessPlacement,
        "lockstep": lambda graph: ProcessPlacement(graph, lockstep=True),
    }
    return places[request.param]


PATIENCE_S = 180
"""What never comes is a failure; what comes late is a machine with other work, and Ray's processes are many."""


@pytest.fixture(params=[*HERE, "ray"])
def place(request: pytest.FixtureRequest) -> Place:
    return find_place(request)


@pytest.fixture(params=[*HERE, pytest.param("ray", marks=pytest.mark.slow)])
def place_slow_on_ray(request: pytest.FixtureRequest) -> Place:
    """Every run on Ray imports torch anew, so that what other tests cover in part runs there in the long matrix."""
    return find_place(request)


def advance_until(placement: Any, condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"not within {PATIENCE_S} s: {what}; {placement.reports()}"
        placement.advance()


def positions(placement: Any) -> dict[str, float]:
    return {f"{r.kind}-{r.index}": r.metrics.get("position", 0.0) for r in placement.reports()}


def check_pipeline(placement: Any, counter: Any, count: int) -> None:
    """The consumer itself checks order and content of every message."""
    try:
        advance_until(placement, lambda: bool(placement.done), "the end of the stream makes every role done")
        assert positions(placement) == {"producer-0": count, "relay-0": count, "consumer-0": count}
        assert placement.open(counter).total() == 2 * count, "the sum over both writers"
    finally:
        placement.close()


def test_stream_keeps_order_and_loses_nothing_while_messages_grow(place_slow_on_ray: Place) -> None:
    graph = pipeline(200, capacity=3, growth=50)
    counter = graph.counter("messages")
    check_pipeline(place_slow_on_ray(graph), counter, 200)


def test_two_spawned_processes_do_the_same() -> None:
    graph = Graph()
    outlet, inlet = graph.stream("only", 2)
    graph.add(Producer, Settings(count=50), Handles(outlet=outlet))
    graph.add(Consumer, Settings(count=50), Handles(inlet=inlet))
    placement = ProcessPlacement(graph, spawn=KINDS)
    try:
        advance_until(placement, lambda: placement.done, "done")
        assert positions(placement) == {"producer-0": 50, "consumer-0": 50}
    finally:
        placement.close()


def test_trap_14_a_stream_never_holds_more_than_its_capacity(place_slow_on_ray: Place) -> None:
    graph = Graph()
    outlet, inlet = graph.stream("blocked", 5)
    graph.add(Producer, Settings(count=100), Handles(outlet=outlet))
    graph.add(Stuck, Settings(), Handles(inlet=inlet))
    placement = place_slow_on_ray(graph)
    try:
        advance_until(placement, lambda: positions(placement)["producer-0"] == 5, "the stream fills up")
        for _ in range(10):
            placement.advance()
        assert positions(placement)["producer-0"] == 5
        assert {r.kind: r.idle for r in placement.reports()}["producer"] == "room"
    finally:
        placement.close()


def test_latest_value_is_never_torn_and_never_goes_back(place: Place) -> None:
    graph = Graph()
    settings = Settings(count=60, size=40_000, growth=1_000, pace_s=0.0005)
    graph.add(Painter, settings, Handles(publisher=graph.publisher("picture")))
    graph.add(Viewer, settings, Handles(subscriber=graph.subscriber("picture")))
    graph.add(Viewer, settings, Handles(subscriber=graph.subscriber("picture")))
    own = graph.subscriber("picture")
    placement = place(graph)
    try:
        advance_until(placement, lambda: bool(placement.done), "both viewers see the last value")
        seen: list[int] = []

        def newest() -> bool:
            value = placement.open(own).latest()
            seen.extend([] if value is None else [value.version.number])
            return seen[-1:] == [60]

        advance_until(placement, newest, "the caller, who may subscribe too, sees the last value")
        assert seen == sorted(seen)
        assert placement.open(own).latest() is None, "nothing newer"
    finally:
        placement.close()


def test_caller_can_hold_both_kinds_of_stream_ends_and_publish(place_slow_on_ray: Place) -> None:
    graph = Graph()
    outlet, inlet = graph.stream("in", 2)
    out_again, in_again = graph.stream("out", 2)
    graph.add(Relay, Settings(), Handles(inlet=inlet, outlet=out_again))
    graph.add(Viewer, Settings(count=1), Handles(subscriber=graph.subscriber("news")))
    publisher = graph.publisher("news")
    placement = place_slow_on_ray(graph)
    try:
        sender, receiver = placement.open(outlet), placement.open(in_again)
        placement.open(publisher).publish(weights(1, 10))
        sender.send(weights(7, 3))
        sender.close()
        came = []

        def received() -> bool:
            came.extend(m for m in [receiver.receive()] if m is not None)
            return receiver.exhausted() and placement.done

        advance_until(placement, received, "the relay passes it on and ends")
        assert [message.version.number for message in came] == [7]
        came[0].flat[0] = 1.0  # the receiver's own to change
    finally:
        placement.close()


def test_role_that_raises_is_one_failure_that_names_it(place: Place) -> None:
    check_failure(place, "raise", "ValueError: boom")


def test_role_that_cannot_be_built_is_one_failure_that_names_it(place_slow_on_ray: Place) -> None:
    check_failure(place_slow_on_ray, "build", "ValueError: cannot be made")


def check_failure(place: Place, fault: str, cause: str) -> None:
    graph = Graph()
    graph.add(Faulty, Settings(), Handles())
    graph.add(Faulty, Settings(fault=fault, fault_at=3), Handles())

    def run() -> None:
        placement = place(graph)
        try:
            advance_until(placement, lambda: False, "the failure")
        finally:
            placement.close()

    with pytest.raises(RoleFailure) as caught:
        run()
    assert (caught.value.role, caught.value.index) == ("faulty", 1)
    assert cause in caught.value.cause


def test_actor_whose_process_is_killed_is_one_failure_that_names_it(ray_session: None) -> None:
    from qfleet.runtime.ray import RayPlacement

    check_failure(RayPlacement, "kill", "its process was killed by SIGKILL")


def test_cut_run_goes_on_without_losing_or_repeating_a_message(place: Place, tmp_path: Path) -> None:
    graph = pipeline(300, capacity=4, pace_s=0.002)
    counter = graph.counter("messages")
    placement = place(graph)
    try:
        advance_until(placement, lambda: positions(placement)["consumer-0"] >= 20, "a part of the work")
        save(placement, tmp_path)
        advance_until(placement, lambda: bool(placement.done), "the first run is not disturbed by being saved")
        assert positions(placement)["consumer-0"] == 300
    finally:
        placement.close()
    again = place(graph)
    again.restore(tmp_path)
    check_pipeline(again, counter, 300)
