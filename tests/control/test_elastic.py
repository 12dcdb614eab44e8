"""The elastic policy: who gets actors when nodes come and go, what a person asks for, and that it comes to rest."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.control.elastic import Change, Elastic, Limits, NodeSight, Sight, Wish

SETTLE_S = 30.0


def policy(wanted: int = 2, most: int = 16, least: int = 1, learners: int = 1, automatic: bool = True) -> Elastic:
    return Elastic(Limits(least, most, 1, 4, SETTLE_S, automatic, max_shards=3), wanted, learners)


def node(name: str, actors: int, cores: float = 4.0, others: int = 0, draining: str = "") -> NodeSight:
    return NodeSight(name, name, cores, actors, others, draining)


def sight(at: float, *nodes: NodeSight, learners: int = 1, short: str = "", saturated: bool = False) -> Sight:
    return Sight(at, nodes, learners, short, saturated)


def done(seen: Sight, changes: list[Change], at: float) -> Sight:
    """Return what is seen when the changes were made."""
    after = {change.node: change.after for change in changes if change.role == "actor"}
    ranks = [change.after for change in changes if change.role == "learner"]
    nodes = [dataclasses.replace(one, actors=after.get(one.id, one.actors)) for one in seen.nodes]
    return dataclasses.replace(seen, at=at, nodes=nodes, learners=ranks[0] if ranks else seen.learners)


def moves(changes: list[Change]) -> dict[str, tuple[int, int]]:
    return {change.node or "learners": (change.before, change.after) for change in changes}


def test_a_run_that_is_as_it_should_be_is_left_alone_however_crowded_it_is() -> None:
    elastic = policy(wanted=9)
    assert [elastic.decide(sight(at, node("here", 9, cores=2, others=3))) for at in (0, 100, 1000)] == [[], [], []]


def test_a_node_that_joins_gets_actors_for_its_cores_when_it_has_stayed_a_while() -> None:
    elastic, here = policy(wanted=2), node("here", 2)
    elastic.decide(sight(0.0, here))
    assert elastic.decide(sight(1.0, here, node("new", 0, cores=6.5))) == []
    assert elastic.decide(sight(SETTLE_S, here, node("new", 0, cores=6.5))) == []
    changes = elastic.decide(sight(1.0 + SETTLE_S, here, node("new", 0, cores=6.5)))
    assert moves(changes) == {"new": (0, 6)}
    assert "new joined with 6.5 cores" in changes[0].reason


def test_a_node_that_comes_and_goes_changes_nothing() -> None:
    elastic, here = policy(wanted=2), node("here", 2)
    for at in range(0, 400, 20):
        nodes = [here, node("flapping", 0)] if at % 40 else [here]
        assert elastic.decide(sight(float(at), *nodes)) == []


def test_a_node_that_joins_gets_none_while_actors_wait_for_the_learner() -> None:
    elastic, here = policy(wanted=2), node("here", 2)
    elastic.decide(sight(0.0, here))
    for at in (1.0, 50.0, 100.0):
        assert elastic.decide(sight(at, here, node("new", 0), saturated=True)) == []
    assert moves(elastic.decide(sight(101.0, here, node("new", 0)))) == {"new": (0, 4)}


def test_two_nodes_that_join_are_used_one_after_the_other_within_the_limit() -> None:
    elastic = policy(wanted=2, most=9)
    elastic.decide(sight(0.0, node("here", 2)))
    seen = sight(1.0, node("here", 2), node("a", 0), node("b", 0))
    elastic.decide(seen)
    first = elastic.decide(dataclasses.replace(seen, at=40.0))
    assert sum(after - before for before, after in moves(first).values()) == 4
    seen = done(seen, first, 41.0)
    assert elastic.decide(seen) == []
    second = elastic.decide(dataclasses.replace(seen, at=80.0))
    assert sum(after - before for before, after in moves(second).values()) == 3, "there is room for nine in all"


def test_a_node_that_is_to_go_is_left_at_once_and_its_actors_go_where_there_is_room() -> None:
    elastic = policy(wanted=5)
    elastic.decide(sight(0.0, node("here", 2, others=1), node("spot", 3)))
    changes = elastic.decide(sight(0.5, node("here", 2, others=1), node("spot", 3, draining="preempted")))
    assert moves(changes) == {"spot": (3, 0), "here": (2, 3)}
    assert changes[0].node == "spot", "who leaves makes room first"
    assert all("spot is to go (preempted)" in change.reason for change in changes)
    gone = sight(2.0, node("here", 3, others=1))
    assert elastic.decide(gone) == [], "that it is gone at last is nothing new"


def test_a_node_that_is_to_go_is_told_as_the_reason_whatever_else_is_wished_for() -> None:
    """The reason of another change that came at the same moment was once told in its place."""
    elastic = policy(wanted=3, most=8)
    seen = sight(0.0, node("here", 2, others=1), node("spot", 1), short="too few")
    elastic.decide(seen)
    (change,) = elastic.decide(
        sight(60.0, node("here", 2, cores=2, others=1), node("spot", 1, draining="preempted"), short="too few")
    )
    assert (change.node, change.after, change.reason) == ("spot", 0, "node spot is to go (preempted)")
    elastic.take(Wish("ann@desk", actors=4))
    (more,) = elastic.decide(sight(61.0, node("here", 2, cores=2, others=1), node("spot", 0, draining="preempted")))
    assert (more.node, more.after, more.reason) == ("here", 4, "asked for by ann@desk")


def test_a_lost_node_takes_the_actors_with_it_that_came_with_it() -> None:
    elastic = policy(wanted=2)
    elastic.decide(sight(0.0, node("here", 2, cores=16)))
    elastic.decide(sight(1.0, node("here", 2, cores=16), node("new", 0)))
    assert moves(elastic.decide(sight(40.0, node("here", 2, cores=16), node("new", 0)))) == {"new": (0, 4)}
    elastic.decide(sight(41.0, node("here", 2, cores=16), node("new", 4)))
    assert elastic.decide(sight(42.0, node("here", 2, cores=16))) == []


def test_what_a_lost_node_had_is_begun_elsewhere_as_far_as_there_is_room() -> None:
    elastic = policy(wanted=6)
    elastic.decide(sight(0.0, node("here", 3), node("other", 3)))
    changes = elastic.decide(sight(1.0, node("here", 3)))
    assert moves(changes) == {"here": (3, 4)}
    assert changes[0].reason == "node other was lost"


def test_without_automation_nothing_is_moved_or_added() -> None:
    elastic = policy(wanted=5, automatic=False)
    elastic.decide(sight(0.0, node("here", 2), node("spot", 3)))
    changes = elastic.decide(sight(0.5, node("here", 2), node("spot", 3, draining="preempted"), node("new", 0)))
    assert moves(changes) == {"spot": (3, 0)}
    assert elastic.decide(sight(100.0, node("here", 2), node("new", 0), short="actors work 99%")) == []


def test_one_more_actor_where_they_hold_the_learner_up_for_long() -> None:
    elastic, here = policy(wanted=1, most=3), node("here", 1)
    assert elastic.decide(sight(0.0, here, short="too few")) == []
    assert elastic.decide(sight(20.0, here)) == [], "it did not last"
    assert elastic.decide(sight(25.0, here, short="too few")) == []
    changes = elastic.decide(sight(60.0, here, short="too few"))
    assert [(change.after, change.reason) for change in changes] == [(2, "too few")]
    assert elastic.decide(sight(61.0, node("here", 2), short="too few")) == []


def test_what_a_person_asks_for_is_done_at_once_and_holds() -> None:
    elastic = policy(wanted=2, most=8)
    here = node("here", 2, cores=2)
    elastic.decide(sight(0.0, here))
    assert elastic.refusal(Wish("ann@desk", actors=6, learners=3)) == ""
    elastic.take(Wish("ann@desk", actors=6, learners=3))
    changes = elastic.decide(sight(0.1, here))
    assert moves(changes) == {"here": (2, 6), "learners": (1, 3)}
    assert all("ann@desk" in change.reason for change in changes)
    later = sight(90.0, node("here", 6, cores=2), node("new", 0), learners=3, short="too few")
    assert elastic.decide(later) == []


def test_ranks_that_a_death_has_cost_come_back_only_when_a_person_says_so() -> None:
    elastic = policy(learners=3)
    assert elastic.decide(sight(0.0, node("here", 2), learners=3)) == []
    assert elastic.decide(sight(1.0, node("here", 2), learners=2)) == []
    elastic.take(Wish("ann@desk", learners=3))
    for at in (2.0, 3.0):
        assert moves(elastic.decide(sight(at, node("here", 2), learners=2))) == {"learners": (2, 3)}, "until it is done"
    assert elastic.decide(sight(4.0, node("here", 2), learners=3)) == []
    assert elastic.decide(sight(5.0, node("here", 2), learners=2)) == []


def test_a_wish_beyond_the_room_is_refused_with_the_setting() -> None:
    elastic = policy(most=4)
    assert "--elastic.max_actors 5" in elastic.refusal(Wish("ann", actors=5))
    assert "room for 1 to 4" in elastic.refusal(Wish("ann", actors=0))
    assert "--elastic.max_learners 9" in elastic.refusal(Wish("ann", learners=9))


def shards_of(changes: list[Change]) -> list[tuple[int, int, str]]:
    return [(change.before, change.after, change.reason) for change in changes if change.role == "shard"]


def congested(at: float, shards: int, why: str = "shards are slow", saturated: bool = True) -> Sight:
    return dataclasses.replace(sight(at, node("here", 2), saturated=saturated), shards=shards, congested=why)


def test_one_more_shard_where_they_hold_up_the_others_for_long_up_to_the_limit() -> None:
    elastic = policy()
    assert elastic.decide(congested(0.0, 1)) == []
    assert elastic.decide(congested(20.0, 1, why="")) == [], "it did not last"
    assert elastic.decide(congested(25.0, 1)) == []
    assert elastic.decide(congested(54.0, 1)) == []
    for at in (55.0, 56.0):
        assert shards_of(elastic.decide(congested(at, 1))) == [(1, 2, "shards are slow")], "until it is done"
    assert elastic.decide(congested(60.0, 2)) == []
    assert shards_of(elastic.decide(congested(90.0, 2))) == [(2, 3, "shards are slow")]
    assert [elastic.decide(congested(at, 3)) for at in (100.0, 1000.0)] == [[], []]


def test_shards_are_not_added_by_themselves_when_a_person_asked_for_a_number_or_nothing_is_automatic() -> None:
    elastic = policy()
    elastic.take(Wish("ann@desk", shards=2))
    assert shards_of(elastic.decide(congested(0.0, 1))) == [(1, 2, "asked for by ann@desk")]
    assert [elastic.decide(congested(at, 2)) for at in (1.0, 100.0, 1000.0)] == [[], [], []]
    elastic.take(Wish("ann@desk", shards=1))
    assert shards_of(elastic.decide(congested(1001.0, 2))) == [(2, 1, "asked for by ann@desk")]
    alone = policy(automatic=False)
    assert [alone.decide(congested(at, 1)) for at in (0.0, 100.0)] == [[], []]


def test_a_shard_and_an_actor_are_not_added_at_the_same_time() -> None:
    elastic = policy(wanted=2, most=8)
    both = [dataclasses.replace(congested(at, 1, saturated=False), short="too few") for at in (0.0, 40.0)]
    elastic.decide(both[0])
    assert [change.role for change in elastic.decide(both[1])] == ["shard"]


def test_shards_beyond_the_parts_of_the_replay_are_refused_with_the_setting() -> None:
    elastic = policy()
    assert "--elastic.max_shards 4" in elastic.refusal(Wish("ann", shards=4))
    assert "room for 1 to 3" in elastic.refusal(Wish("ann", shards=0))
    assert elastic.refusal(Wish("ann", shards=3)) == ""


nodes = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.floats(0, 12), st.integers(0, 3), st.booleans()),
    max_size=5,
    unique_by=lambda one: one[0],
)
steps = st.tuples(st.floats(0.1, 90.0), nodes, st.booleans(), st.booleans(), st.none() | st.integers(1, 12))


@given(st.integers(1, 4), st.integers(4, 12), st.booleans(), st.lists(steps, max_size=12))
@settings(max_examples=80, deadline=None)
def test_limits_hold_nodes_that_go_are_left_and_every_situation_comes_to_rest(
    least: int, most: int, automatic: bool, story: list[tuple[float, list, bool, bool, int | None]]
) -> None:
    elastic = policy(wanted=least, most=most, least=least, automatic=automatic)
    actors, at = {"driver": least}, 0.0
    elastic.decide(sight(0.0, node("driver", least)))
    for seconds, others, short, saturated, wish in story:
        at += seconds
        alive = [("driver", 4.0, 1, False), *others]
        if wish is not None and not elastic.refusal(Wish("ann", actors=wish)):
            elastic.take(Wish("ann", actors=wish))
        for _ in range(3):
            seen = sight(
                at,
                *(node(name, actors.get(name, 0), cores, rest, "soon" * going) for name, cores, rest, going in alive),
                short="too few" * short,
                saturated=saturated,
            )
            changes = elastic.decide(seen)
            actors = {one.id: one.actors for one in done(seen, changes, at).nodes}
            assert all(change.reason and change.before != change.after and change.after >= 0 for change in changes)
        assert changes == [], "nothing changed, and so nothing is to be done"
        assert least <= sum(actors.values()) <= most
        assert not any(actors[name] for name, _, _, going in others if going)


@given(nodes, st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_cluster_that_stays_as_it_is_is_changed_a_bounded_number_of_times(others: list, short: bool) -> None:
    elastic = policy(wanted=1, most=12)
    elastic.decide(sight(0.0, node("driver", 1)))
    actors, changed = {"driver": 1}, 0
    for at in range(1, 2000, 10):
        alive = [("driver", 4.0, 1, False), *others]
        seen = sight(
            float(at),
            *(node(name, actors.get(name, 0), cores, rest, "soon" * going) for name, cores, rest, going in alive),
            short="too few" * short,
        )
        changes = elastic.decide(seen)
        changed += bool(changes)
        actors = {one.id: one.actors for one in done(seen, changes, at).nodes}
        assert all(change.after > change.before for change in changes), "what was added is not taken back"
    assert changed <= 12
    assert math.isfinite(elastic.wanted)


def test_nothing_is_decided_where_no_node_is_seen_and_nobody_is_given_up_for_it() -> None:
    """A local Ray whose raylet was killed has none: the policy looked for the roomiest of them."""
    elastic = policy(wanted=2)
    elastic.decide(sight(0.0, node("here", 2)))
    elastic.take(Wish("ann@desk", actors=3, learners=2, shards=2))
    assert elastic.decide(sight(1.0)) == []
    assert policy().decide(sight(0.0)) == []
    assert len(elastic.decide(sight(2.0, node("here", 2)))) == 3, "what was asked for is not forgotten"


def test_a_wish_that_rests_after_a_failure_leaves_ranks_free_to_move_off_a_node_that_is_to_go() -> None:
    elastic, here = policy(learners=2), node("here", 2)
    going = dataclasses.replace(node("there", 0), ranks=1, draining="Ray drains it")
    seen = sight(0.0, here, going, learners=2)
    elastic.take(Wish("ann@desk", learners=3))
    assert moves(elastic.decide(seen)) == {"learners": (2, 3)}
    both = dataclasses.replace(seen, at=0.1, resting=frozenset({"learner", "move"}))
    assert elastic.decide(both) == []
    (move,) = elastic.decide(dataclasses.replace(seen, at=0.2, resting=frozenset({"learner"})))
    assert (move.before, move.after, move.reason) == (2, 2, "node there is to go (Ray drains it)")
    assert moves(elastic.decide(dataclasses.replace(seen, at=1.0))) == {"learners": (2, 3)}


def test_ranks_of_a_node_that_is_to_go_move_once_and_keep_their_number() -> None:
    elastic = policy(learners=2)
    here = node("here", 2)
    assert elastic.decide(sight(0.0, here, dataclasses.replace(node("there", 0), ranks=1), learners=2)) == []
    going = dataclasses.replace(node("there", 0), ranks=1, draining="Ray drains it")
    (change,) = elastic.decide(sight(1.0, here, going, learners=2))
    assert (change.role, change.before, change.after) == ("learner", 2, 2)
    assert change.reason == "node there is to go (Ray drains it)"
    assert elastic.decide(sight(2.0, here, going, learners=2)) == [], "they may have nowhere to go"
    assert len(elastic.decide(sight(1.0 + SETTLE_S, here, going, learners=2))) == 1
    left = dataclasses.replace(going, ranks=0)
    assert elastic.decide(sight(1.0 + 3 * SETTLE_S, here, left, learners=2)) == []
    driver = dataclasses.replace(here, ranks=2, draining="Ray drains it")
    changes = elastic.decide(sight(1.0 + 5 * SETTLE_S, driver, learners=2))
    assert not [change for change in changes if change.role == "learner"], "the driver's node is never left"
