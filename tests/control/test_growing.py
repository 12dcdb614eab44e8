"""What joins the elastic policy to a run: requests of people, seats that are taken and given back, answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from qfleet.control import levers
from qfleet.control.growing import Growing
from qfleet.control.levers import Situation
from qfleet.control.sights import Span, look
from qfleet.core.protocols import Machine, Report, Scalable
from qfleet.core.types import Orders
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.roles.actor import NO_ROOM
from qfleet.roles.learner import NO_BATCH


class Fake:
    """A placement with six seats for actors and three for learners, on two machines; two parts of a replay."""

    def __init__(self, actors: int = 2, learners: int = 1) -> None:
        self.shards = 1
        self.homes = {index: "here" if index < actors else "" for index in range(6)}
        self.learners, self.willing = learners, True
        self.leaving: list[int] = []
        self.draining, self.rank_home, self.gone = "", "here", False
        self.tried = 0
        """How often shards or learners were to change."""
        self.sizes: list[int] = []
        """Of how many ranks a group was to be formed, try by try."""

    def machines(self) -> list[Machine]:
        if self.gone:
            return []
        return [Machine("here", "head", 8.0), Machine("there", "worker", 4.0, self.draining)]

    def home(self, name: str) -> str:
        kind, _, index = name.partition("-")
        if name == "learner-1":
            return self.rank_home
        return self.homes[int(index)] if kind == "actor" else "here"

    def present(self, kind: str) -> list[int]:
        if kind == "learner":
            return list(range(self.learners))
        if kind == "replay":
            return list(range(self.shards))
        return [index for index, home in self.homes.items() if home and index not in self.leaving]

    def absent(self, kind: str) -> list[int]:
        return [index for index, home in self.homes.items() if not home]

    def come(self, kind: str, indices: Sequence[int], machine: str) -> bool:
        assert indices, "a placement may be unable to let nobody come"
        self.homes |= {index: machine for index in indices if self.willing}
        return self.willing

    def go(self, kind: str, indices: Sequence[int]) -> None:
        self.leaving += indices

    def share(self, kind: str, size: int) -> str:
        self.tried += 1
        self.shards = size if self.willing else self.shards
        return "" if self.willing else "replay-0 has just died"

    def regroup(self, kind: str, size: int, rest: str) -> str:
        self.tried += 1
        self.sizes.append(size)
        self.learners = size if self.willing else self.learners
        return "" if self.willing else "learner-0 has just died"


def experiment(**changes: Any) -> Experiment:
    room = {
        "placement": "processes",
        "actors": 2,
        "elastic.max_actors": 6,
        "elastic.max_learners": 3,
        "elastic.max_shards": 2,
    }
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
        "event": "scaled", "request": "7", "by": "ann@desk", "applied": True, "text": "3 actors, 2 learners, 1 shard",
    }  # fmt: skip
    assert growing.presence() == ([0, 1, 2], 2, 1)
    growing.ask({"id": "8", "by": "ann@desk", "actors": 1, "learners": None})
    assert told(growing.look(0.2, 0, [])) == [("actors", 3, 1)]
    assert placement.leaving == [1, 2], "the last ones"


def test_what_cannot_be_done_now_is_done_later(growing: Growing, placement: Fake) -> None:
    placement.willing = False
    growing.ask({"id": "7", "by": "ann", "actors": 4, "learners": 3})
    assert told(growing.look(0.1, 0, [])) == []
    placement.willing = True
    assert [event["event"] for event in growing.look(1.2, 0, [])] == ["elastic", "elastic", "scaled"]


@pytest.mark.parametrize("wish", [{"shards": 2}, {"learners": 2}])
def test_what_cannot_be_done_for_long_is_tried_ever_more_rarely_and_up_to_a_bound(
    wish: dict[str, int], growing: Growing, placement: Fake
) -> None:
    """Each try makes roles stand still, and there was one at every pass of the monitor."""
    placement.willing = False
    growing.ask({"id": "7", "by": "ann", **wish})
    tries, times = 0, []
    for tick in range(1, 6000):
        growing.look(0.1 * tick, 0, [])
        if placement.tried > tries:
            tries, times = placement.tried, [*times, 0.1 * tick]
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[:4] == pytest.approx([1.0, 2.0, 4.0, 8.0], abs=0.5)
    assert pauses[6:] == pytest.approx([60.0] * len(pauses[6:]), abs=0.5)
    assert len(pauses) > 10
    placement.willing = True
    events = growing.look(times[-1] + 61.0, 0, [])
    assert [event["event"] for event in events] == ["elastic", "scaled"], "the wish was kept"


def test_whoever_asks_is_told_once_that_the_wish_waits_and_why(growing: Growing, placement: Fake) -> None:
    placement.willing = False
    growing.ask({"id": "7", "by": "ann", "shards": 2})
    (waits,) = growing.look(0.1, 0, [])
    assert (waits["event"], waits["request"], waits["by"]) == ("waiting", "7", "ann")
    assert "shards 2 must wait: replay-0 has just died" in waits["text"]
    assert [growing.look(float(now), 0, []) for now in range(1, 20)] == [[]] * 19


def test_a_number_that_must_wait_keeps_no_other_from_being_asked_for(growing: Growing, placement: Fake) -> None:
    """The next wish was heeded only when the one before was met, and so never where that could not be."""
    placement.willing = False
    growing.ask({"id": "7", "by": "ann", "shards": 2})
    growing.look(0.1, 0, [])
    growing.ask({"id": "8", "by": "bob", "shards": 1})
    answers = growing.look(0.2, 0, [])
    assert [(one["request"], one["applied"]) for one in answers] == [("7", False), ("8", True)]
    assert "bob" in answers[0]["text"]


def test_a_new_wish_is_tried_at_once_however_long_the_last_one_has_waited(growing: Growing, placement: Fake) -> None:
    placement.willing = False
    growing.ask({"id": "7", "by": "ann", "shards": 2})
    for now in range(100):
        growing.look(float(now), 0, [])
    placement.willing = True
    growing.ask({"id": "8", "by": "bob", "shards": 2})
    assert [one["event"] for one in growing.look(99.1, 0, [])] == ["scaled", "elastic", "scaled"]


def test_a_seat_whose_role_is_still_leaving_is_not_given_away(growing: Growing, placement: Fake) -> None:
    growing.ask({"id": "7", "by": "ann", "actors": 1})
    growing.look(0.1, 0, [])
    growing.ask({"id": "8", "by": "ann", "actors": 6})
    events = growing.look(0.2, 0, [])
    assert len(placement.present("actor")) == 5
    assert not [event for event in events if event["event"] == "scaled"]
    placement.leaving, placement.homes[1] = [], ""
    assert growing.look(0.3, 0, [])[-1]["text"] == "6 actors, 1 learner, 1 shard"


def test_nobody_is_asked_to_come_while_all_seats_are_still_being_left(growing: Growing, placement: Fake) -> None:
    growing.ask({"id": "7", "by": "ann", "actors": 6})
    growing.look(0.1, 0, [])
    growing.ask({"id": "8", "by": "ann", "actors": 1})
    growing.look(0.2, 0, [])
    growing.ask({"id": "9", "by": "ann", "actors": 6})
    assert told(growing.look(0.3, 0, [])) == []


def test_a_wish_that_nothing_hinders_and_nothing_meets_is_not_waited_for_for_ever(
    growing: Growing, placement: Fake
) -> None:
    """A rank that died after it had come is not brought back, and so the wish was pending to the end of the run."""
    placement.homes, placement.leaving = dict.fromkeys(range(6), "here"), [1]
    growing.ask({"id": "7", "by": "ann", "actors": 6, "learners": 2})
    growing.look(0.1, 0, [])
    growing.look(0.2, 0, [])
    placement.learners, placement.leaving, placement.homes[1] = 1, [], ""
    growing.ask({"id": "8", "by": "bob", "actors": 3})
    events = [event for tenth in range(3, 300) for event in growing.look(0.1 * tenth, 0, [])]
    answers = [(one["request"], one["applied"], one["text"]) for one in events if one["event"] == "scaled"]
    assert answers == [
        ("7", False, "not done yet, and bob has asked for something since"),
        ("8", True, "3 actors, 1 learner, 1 shard"),
    ]


def test_a_wish_that_is_about_to_be_met_is_not_given_up_for_the_next(growing: Growing, placement: Fake) -> None:
    placement.homes, placement.leaving = dict.fromkeys(range(6), "here"), [1]
    growing.ask({"id": "7", "by": "ann", "actors": 6})
    growing.look(0.1, 0, [])
    growing.ask({"id": "8", "by": "bob", "learners": 2})
    assert growing.look(0.2, 0, []) == []
    placement.leaving, placement.homes[1] = [], ""
    events = growing.look(0.3, 0, []) + growing.look(0.4, 0, [])
    assert [(one["request"], one["applied"]) for one in events if one["event"] == "scaled"] == [
        ("7", True),
        ("8", True),
    ]


def test_nobody_is_told_of_roles_that_the_wish_does_not_name(growing: Growing, placement: Fake) -> None:
    placement.willing = False
    growing.ask({"id": "7", "by": "ann", "learners": 3})
    growing.look(0.1, 0, [])
    growing.ask({"id": "8", "by": "bob", "actors": 6})
    former, waits = growing.look(0.2, 0, [])
    assert "learners 3 must wait" in former["text"]
    assert waits["request"] == "8"
    assert waits["text"].startswith("actors 6 must wait: they have come")
    assert "learners" not in waits["text"]


def test_a_wish_that_fails_does_not_keep_ranks_on_a_node_that_is_to_go() -> None:
    """Its delays of up to a minute held for moves, too, and used up their turns."""
    placement = Fake(learners=2)
    growing, placement.rank_home, placement.willing = Growing(experiment(), placement), "there", False
    growing.ask({"id": "7", "by": "ann", "learners": 3})
    for now in range(40):  # the next try is at 63 s
        growing.look(float(now), 0, [])
    assert set(placement.sizes) == {3}
    placement.sizes, placement.draining = [], "preempted"
    growing.look(40.0, 0, [])
    assert placement.sizes == [2], "they move, as many as they are"


def test_moves_that_fail_are_tried_ever_more_rarely_and_never_lose_a_turn() -> None:
    placement = Fake(learners=2)
    growing = Growing(experiment(**{"elastic.settle_s": 5.0}), placement)
    placement.rank_home, placement.willing, placement.draining = "there", False, "preempted"
    times = []
    for tick in range(3000):
        tries = placement.tried
        growing.look(0.1 * tick, 0, [])
        times += [0.1 * tick] if placement.tried > tries else []
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[:3] == pytest.approx([5.0] * 3, abs=1.1)
    assert max(pauses) <= 61.1


def test_where_no_machine_is_seen_nothing_is_done_and_a_wish_waits(growing: Growing, placement: Fake) -> None:
    placement.gone = True
    growing.ask({"id": "7", "by": "ann", "actors": 3})
    assert [growing.look(float(now), 0, at_work(float(now), 0.9, 0.3, 0.3, 1)) for now in range(1, 20)] == [[]] * 19
    placement.gone = False
    assert [event["event"] for event in growing.look(20.0, 0, [])] == ["elastic", "scaled"]


def test_refusals_say_which_setting_makes_room(growing: Growing) -> None:
    for number, wish in enumerate(({"actors": 7}, {"learners": 4}, {"actors": 0}, {"shards": 3})):
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


def at_work(seconds: float, replay: float, actors: float, learner: float, shards: int) -> list[Report]:
    """Return what roles report that work such shares of the time; two parts of the replay share that of theirs."""

    def report(kind: str, index: int, busy: float, reason: str, host: int | None = None) -> Report:
        idle = {reason: (1 - busy) * seconds}
        return Report(kind, index, "running", {}, busy * seconds, idle, host=host)

    parts = [report("replay", part, replay / 2, "", host=0 if part >= shards else None) for part in range(2)]
    acting = [report("actor", index, actors, NO_ROOM) for index in range(2)]
    return [*acting, *parts, report("learner", 0, learner, NO_BATCH)]


@pytest.mark.parametrize(
    ("replay", "actors", "learner", "added"),
    [(0.98, 0.3, 0.3, 1), (0.8, 0.3, 0.3, 0), (0.98, 0.9, 0.3, 0), (0.98, 0.3, 0.9, 0)],
    ids=["shards hold up all", "shards have time", "actors do not wait", "the learner does not wait"],
)
def test_a_shard_is_added_where_it_holds_up_actors_and_learner(
    replay: float, actors: float, learner: float, added: int, placement: Fake
) -> None:
    growing, events = Growing(experiment(), placement), []
    for now in range(60):
        events += growing.look(float(now), 0, at_work(float(now), replay, actors, learner, placement.shards))
    assert told(events) == [("shards", 1, 2)] * added
    assert all(event["text"].startswith("a shard works 98% of the time, actors wait 70%") for event in events)
    assert growing.presence()[2] == 1 + added


@pytest.mark.parametrize(("busiest", "helped"), [(0, True), (1, False), (2, True)])
def test_a_shard_that_has_a_single_part_gets_no_help(busiest: int, helped: bool) -> None:
    """Of three parts in two shards the first shard has the first and the last."""
    others = at_work(10.0, 0.0, 0.3, 0.3, shards=2)
    parts = [Report("replay", part, "running", {}, 9.8 * (part == busiest), {}) for part in range(3)]
    reports = [one for one in others if one.kind != "replay"] + parts
    idle = [Report(one.kind, one.index, "running", {}, 0.0, {}) for one in reports]
    seen = Situation(Span(look(0.0, 0, idle), look(10.0, 0, reports)), Orders((8,)), 8, 8.0)
    assert bool(levers.short_of_shards(seen, 2, free_cores=2.0)) == helped
    assert not levers.short_of_shards(seen, 2, free_cores=0.5)


def test_parts_that_are_in_one_process_are_one_role_among_the_cores() -> None:
    crowded, seen = Fake(), []
    growing = Growing(experiment(), crowded)
    policy: Any = growing._policy
    policy.decide = lambda sight: seen.append(sight) or []
    growing.look(0.0, 0, at_work(0.0, 0.5, 0.5, 0.5, shards=1))
    crowded.shards = 2
    growing.look(2.0, 0, at_work(2.0, 0.5, 0.5, 0.5, shards=2))
    assert [sight.nodes[0].others for sight in seen] == [2, 3]


def test_actors_leave_a_machine_that_is_to_go(placement: Fake) -> None:
    placement.homes[1] = "there"
    growing = Growing(experiment(), placement)
    growing.look(0.0, 0, [])
    placement.draining = "spot notice"
    events = growing.look(1.0, 0, [])
    assert placement.leaving == [1]
    assert told(events) == [("actors", 1, 0), ("actors", 1, 2)]
    assert all("worker is to go (spot notice)" in event["text"] for event in events)
