"""What joins the elastic policy to a run: requests of people, seats that are taken and given back, answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from qfleet.control.growing import Growing
from qfleet.core.protocols import Machine, Scalable
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset


class Fake:
    """A placement with six seats for actors and three for learners, on two machines."""

    def __init__(self, actors: int = 2, learners: int = 1) -> None:
        self.homes = {index: "here" if index < actors else "" for index in range(6)}
        self.learners, self.willing = learners, True
        self.leaving: list[int] = []
        self.draining = ""

    def machines(self) -> list[Machine]:
        return [Machine("here", "head", 8.0), Machine("there", "worker", 4.0, self.draining)]

    def home(self, name: str) -> str:
        kind, _, index = name.partition("-")
        return self.homes[int(index)] if kind == "actor" else "here"

    def present(self, kind: str) -> list[int]:
        if kind == "learner":
            return list(range(self.learners))
        return [index for index, home in self.homes.items() if home and index not in self.leaving]

    def absent(self, kind: str) -> list[int]:
        return [index for index, home in self.homes.items() if not home]

    def come(self, kind: str, indices: Sequence[int], machine: str) -> bool:
        self.homes |= {index: machine for index in indices if self.willing}
        return self.willing

    def go(self, kind: str, indices: Sequence[int]) -> None:
        self.leaving += indices

    def regroup(self, kind: str, size: int, rest: str) -> bool:
        self.learners = size if self.willing else self.learners
        return self.willing


def experiment(**changes: Any) -> Experiment:
    room = {"placement": "processes", "actors": 2, "elastic.max_actors": 6, "elastic.max_learners": 3}
    return with_changes(preset("mountaincar"), {**room, "network.input.normalize": False, **changes})


def told(events: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(event["what"], event["before"], event["after"]) for event in events if event["event"] == "elastic"]


@pytest.fixture
def placement() -> Fake:
    return Fake()


@pytest.fixture
def growing(placement: Fake) -> Growing:
    assert isinstance(placement, Scalable)
    one = Growing(experiment(), placement)
    assert one.look(0.0, 0, []) == []
    return one


def test_what_is_asked_for_is_done_and_answered(growing: Growing, placement: Fake) -> None:
    growing.ask({"id": "7", "by": "ann@desk", "actors": 3, "learners": 2})
    events = growing.look(0.1, 0, [])
    assert sorted(told(events)) == [("actors", 2, 3), ("learners", 1, 2)]
    assert events[-1] == {
        "event": "scaled", "request": "7", "by": "ann@desk", "applied": True, "text": "3 actors, 2 learners",
    }  # fmt: skip
    assert growing.presence() == ([0, 1, 2], 2)
    growing.ask({"id": "8", "by": "ann@desk", "actors": 1, "learners": None})
    assert told(growing.look(0.2, 0, [])) == [("actors", 3, 1)]
    assert placement.leaving == [1, 2], "the last ones"


def test_what_cannot_be_done_now_is_done_later(growing: Growing, placement: Fake) -> None:
    placement.willing = False
    growing.ask({"id": "7", "by": "ann", "actors": 4, "learners": 3})
    assert growing.look(0.1, 0, []) == []
    placement.willing = True
    assert [event["event"] for event in growing.look(0.2, 0, [])] == ["elastic", "elastic", "scaled"]


def test_a_seat_whose_role_is_still_leaving_is_not_given_away(growing: Growing, placement: Fake) -> None:
    growing.ask({"id": "7", "by": "ann", "actors": 1})
    growing.look(0.1, 0, [])
    growing.ask({"id": "8", "by": "ann", "actors": 6})
    events = growing.look(0.2, 0, [])
    assert len(placement.present("actor")) == 5
    assert not [event for event in events if event["event"] == "scaled"]
    placement.leaving, placement.homes[1] = [], ""
    assert growing.look(0.3, 0, [])[-1]["text"] == "6 actors, 1 learners"


def test_refusals_say_which_setting_makes_room(growing: Growing) -> None:
    for number, wish in enumerate(({"actors": 7}, {"learners": 4}, {"actors": 0})):
        growing.ask({"id": str(number), "by": "ann", **wish})
        (answer,) = growing.look(float(number), 0, [])
        assert (answer["request"], answer["applied"]) == (str(number), False)
        assert "--elastic.max_" in answer["text"]


@pytest.mark.parametrize("wish", [{"actors": "3"}, {"actors": 2.5}, {"learners": [2]}, {"actors": True}])
def test_what_is_no_number_is_left_out(wish: dict[str, Any], growing: Growing) -> None:
    growing.ask({"id": "7", "by": "ann", **wish})
    assert growing.look(0.1, 0, []) == []


def test_ranks_that_cannot_be_regrouped_are_refused_both_ways() -> None:
    compressed = experiment(**{"learners": 2, "elastic.max_learners": 0, "parallel.compression": {"kind": "int8"}})
    growing = Growing(compressed, Fake(learners=2))
    growing.ask({"id": "7", "by": "ann", "learners": 1})
    (answer,) = growing.look(0.1, 0, [])
    assert "room for 2 to 2" in answer["text"]


def test_actors_leave_a_machine_that_is_to_go(placement: Fake) -> None:
    placement.homes[1] = "there"
    growing = Growing(experiment(), placement)
    growing.look(0.0, 0, [])
    placement.draining = "spot notice"
    events = growing.look(1.0, 0, [])
    assert placement.leaving == [1]
    assert told(events) == [("actors", 1, 0), ("actors", 1, 2)]
    assert all("worker is to go (spot notice)" in event["text"] for event in events)
