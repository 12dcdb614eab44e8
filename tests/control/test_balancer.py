"""What the balancer sees, does, takes back and does not repeat; and how the bottleneck is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import pytest
from balance_cases import Machine, kinds
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.control import trials
from qfleet.control.balancer import ADVICE_S, Balancer, Decision, Fleet
from qfleet.control.bottleneck import in_turns, side_by_side
from qfleet.control.levers import Situation, set_deadline
from qfleet.control.sights import Span, look
from qfleet.core.protocols import Report
from qfleet.core.types import Orders
from qfleet.roles.actor import UNANSWERED
from qfleet.roles.inference_server import FOR_MORE

WHOLE = Fleet(cores=3, actors=3, envs=4)


def slow(actor: int, envs: int = 4, times: float = 10) -> dict[tuple[int, int], float]:
    return {(actor, env): 0.01 * times for env in range(envs)}


# ------------------------------------------------------------------ stragglers


def test_a_straggler_is_named_within_five_seconds_with_what_holds_it_up() -> None:
    run = Machine(WHOLE)
    assert run.go(10) == []
    run.seconds = slow(1)
    ((at, decision),) = run.go(10)
    assert at <= 15
    assert (decision.kind, decision.role, decision.index) == ("straggler", "actor", 1)
    assert "held up by: its stream is full" in decision.reason


def test_it_is_named_once_until_it_has_recovered() -> None:
    run = Machine(WHOLE)
    run.go(5)
    run.seconds = slow(1)
    assert kinds(run.go(60)) == ["straggler"]
    run.seconds = slow(1, times=1 / 0.6)
    assert run.go(20) == [], "between the two limits nothing is said"
    run.seconds = {}
    assert kinds(run.go(20)) == ["recovered"]
    run.seconds = slow(1, times=3)
    assert kinds(run.go(20)) == ["straggler"]


@given(st.lists(st.floats(51, 100), min_size=2, max_size=8))
@settings(max_examples=30, deadline=None)
def test_actors_that_are_about_equally_fast_are_left_in_peace(rates: list[float]) -> None:
    seconds = {(actor, 0): 1 / rate for actor, rate in enumerate(rates)}
    assert Machine(Fleet(cores=9, actors=len(rates)), learner=1.0, seconds=seconds).go(12) == []


@given(st.lists(st.floats(80, 120), min_size=3, max_size=8), st.data())
@settings(max_examples=30, deadline=None)
def test_whoever_is_far_behind_is_named_and_nobody_else(rates: list[float], data: st.DataObject) -> None:
    behind = data.draw(st.integers(0, len(rates) - 1))
    rates[behind] = data.draw(st.floats(0.1, 35))
    seconds = {(actor, 0): 1 / rate for actor, rate in enumerate(rates)}
    said = Machine(Fleet(cores=9, actors=len(rates)), seconds=seconds).go(12)
    assert [(d.kind, d.index) for _, d in said if d.kind != "more_actors"] == [("straggler", behind)]


def test_one_actor_has_nobody_to_be_compared_with() -> None:
    assert Machine(Fleet(cores=1), seconds=slow(0, 1)).go(10) == []


def test_roles_that_are_starting_are_not_judged() -> None:
    watching = Balancer(Fleet(cores=2, actors=3))
    late = Report("actor", 2, "starting", {"env_steps": 0.0}, 0.0, {})
    for tick in range(100):
        now = 0.1 * tick
        others = [Report("actor", i, "running", {"env_steps": 100 * now}, now, {}) for i in range(2)]
        assert watching.observe(now, int(200 * now), [*others, late]) == []


def test_an_actor_is_not_held_to_what_environments_that_are_given_up_would_do() -> None:
    """One of four that were lost for good: the actor was called a straggler, at a quarter of the others' rate."""
    watching = Balancer(Fleet(cores=4, actors=3, envs=4))
    for tick in range(100):
        now = 0.1 * tick
        acting = [1 if index == 2 else 4 for index in range(3)]
        reports = [
            Report("actor", i, "running", {"env_steps": 25 * n * now, "acting_envs": float(n)}, now, {})
            for i, n in enumerate(acting)
        ]
        assert watching.observe(now, int(225 * now), reports) == []


def test_the_slow_part_of_an_actor_rests_when_the_run_gets_faster_by_it_and_is_tried_again_later() -> None:
    run = Machine(WHOLE, units=2)
    run.go(5)
    run.seconds = slow(1, envs=2)  # one of its two parts
    healthy = run.rate()
    said = run.go(30)
    assert kinds(said) == ["straggler", "rest", "recovered", "kept"]
    assert said[1][0] <= 10, "at the moment when it is seen"
    assert run.balancer.orders.envs == (4, 2, 4)
    kept = said[-1][1]
    assert kept.before is not None
    assert kept.after is not None
    assert kept.after > 1.05 * kept.before
    assert run.rate() > 0.8 * healthy
    said = run.go(trials.BARRED_S)
    assert kinds(said)[:1] == ["return"]
    assert "taken_back" in kinds(said)
    assert run.balancer.orders.envs == (4, 2, 4)
    run.seconds = {}
    assert kinds(run.go(5 * trials.BARRED_S)) == ["return", "kept"]
    assert run.balancer.orders.envs == (4, 4, 4)


def test_a_straggler_that_steps_as_a_whole_is_replaced_by_a_spare_actor() -> None:
    run = Machine(Fleet(cores=8, actors=2, spare=1, envs=4), learner=1e9)
    run.seconds = slow(1)
    said = run.go(20)
    assert kinds(said)[:2] == ["straggler", "move"]
    assert run.balancer.orders.envs == (4, 0, 4)
    assert kinds(said)[-1] == "kept"
    assert said[-1][1].after == pytest.approx(800, rel=0.05)


def test_what_does_not_help_is_taken_back_and_not_tried_again_for_a_long_while() -> None:
    run = Machine(WHOLE, units=2, seconds=slow(1))  # both parts are slow: one alone is half as fast
    said = run.go(trials.BARRED_S)
    assert kinds(said) == ["straggler", "rest", "taken_back"]
    assert said[-1][1].applied
    assert run.balancer.orders.envs == (4, 4, 4)
    assert kinds(run.go(20)) == ["rest", "taken_back"]
    assert run.go(trials.BARRED_S) == []


# ------------------------------------------------------------------ how many act


def test_a_spare_actor_wakes_where_actors_hold_the_learner_up_and_cores_are_free() -> None:
    fleet = Fleet(cores=5, actors=2, spare=2, envs=4)
    run = Machine(fleet, learner=3000.0)
    said = run.go(60)
    assert kinds(said) == ["wake", "kept", "wake", "kept"]
    assert run.balancer.orders.envs == (4, 4, 4, 4)
    assert (said[1][1].before, said[1][1].after) == (pytest.approx(800), pytest.approx(1200))
    assert Machine(Fleet(cores=2, actors=2, spare=2), learner=1000.0).go(30) == [], "no core is free"
    assert Machine(fleet, learner=900.0).go(30) == [], "the learner does not wait"


def test_an_actor_that_makes_the_run_slower_sleeps_again() -> None:
    run = Machine(Fleet(cores=3.3, actors=2, spare=1, envs=4), learner=3000.0)
    original = run.potential
    run.potential = lambda: original() * (0.5 if run.lines[2].awake.any() else 1.0)  # type: ignore[method-assign]
    said = run.go(trials.BARRED_S)
    assert kinds(said) == ["wake", "taken_back"]
    assert run.balancer.orders.envs == (4, 4, 0)


def test_an_actor_sleeps_where_it_takes_the_learners_core() -> None:
    run = Machine(Fleet(cores=2, actors=3, envs=4), learner=400.0)
    original = run.reports

    def reports() -> list[Report]:
        run.learner = {3: 400.0, 2: 480.0, 1: 480.0}[sum(line.awake.any() for line in run.lines)]
        return original()

    run.reports = reports  # type: ignore[method-assign]
    assert run.go(30) == [], "only when it lasts"
    said = run.go(30)
    assert kinds(said) == ["sleep", "kept"]
    assert run.balancer.orders.envs == (4, 4, 0)


def test_one_more_actor_is_advised_where_none_sleeps_and_seldom() -> None:
    said = Machine(Fleet(cores=4, actors=2, envs=4), learner=3000.0).go(ADVICE_S - 1)
    ((_, decision),) = said
    assert (decision.kind, decision.applied) == ("more_actors", False)
    assert "--actors 3 would be faster" in decision.reason


def test_a_balancer_without_levers_only_says_what_it_sees() -> None:
    run = Machine(Fleet(cores=2, actors=2, envs=4, fixed=True), units=2, seconds=slow(1, envs=2), learner=3000.0)
    assert kinds(run.go(20)) == ["straggler"]
    assert run.balancer.orders.envs == (4, 4)


# ------------------------------------------------------------------ fair judgement, and rest


def test_a_pause_of_the_run_is_not_held_against_a_change() -> None:
    run = Machine(Fleet(cores=5, actors=2, spare=1, envs=4), learner=3000.0)
    assert kinds(run.go(5)) == ["wake"]
    run.now += 20  # a checkpoint
    run.balancer.stood_still()
    assert kinds(run.go(10)) == ["kept"]


def test_a_change_is_judged_when_the_evaluator_works_as_before() -> None:
    run = Machine(Fleet(cores=5, actors=2, spare=1, envs=4), learner=3000.0)
    run.go(5)
    run.evaluator = 1.0
    assert run.go(20) == []
    run.evaluator = 0.0
    assert kinds(run.go(10)) == ["kept"]
    other = Machine(Fleet(cores=5, actors=2, spare=1, envs=4), learner=3000.0)
    other.go(5)
    other.evaluator = 1.0
    ((_, decision),) = other.go(trials.PATIENCE_S + 10)
    assert (decision.kind, decision.after) == ("kept", None)


def test_a_resumed_balancer_goes_on_with_the_orders_that_it_had() -> None:
    orders = Orders((4, 0, 2), (1.0,))
    assert Balancer(WHOLE, orders).orders == orders
    assert Balancer(Fleet(cores=1, actors=1, spare=2, envs=3, deadlines_ms=(2.0,))).orders == Orders((3, 0, 0), (2.0,))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    envs = draw(st.sampled_from([1, 4, 6]))
    fleet = Fleet(
        cores=draw(st.sampled_from([1.0, 2.0, 4.0, 8.0])),
        actors=draw(st.integers(1, 4)),
        spare=draw(st.integers(0, 2)),
        envs=envs,
    )
    asked = draw(st.sampled_from([None, "local", "served"]))
    fleet = dataclasses.replace(fleet, begins=asked, deadlines_ms=(0.0,) if asked else ())
    places = st.tuples(st.integers(0, 5), st.integers(0, envs - 1))
    return Machine(
        fleet,
        units=draw(st.sampled_from(sorted({1, min(2, envs), envs}))),
        learner=draw(st.sampled_from([100.0, 600.0, 3000.0, 1e9])),
        crowding=draw(st.sampled_from([0.0, 0.1, 0.4])),
        network_s=draw(st.sampled_from([0.0, 0.01, 0.04])),
        server_s=draw(st.sampled_from([0.0, 0.01, 0.04])),
        seconds=draw(st.dictionaries(places, st.sampled_from([0.005, 0.02, 0.05, 0.5]), max_size=6)),
    )


@given(machines())
@settings(max_examples=25, deadline=None)
def test_a_run_whose_load_does_not_change_comes_to_rest_and_is_not_slower(run: Machine) -> None:
    with pytest.MonkeyPatch.context() as patch:  # short waits, so that the end of all tries is seen
        patch.setattr(trials, "BARRED_S", 5.0)
        patch.setattr(trials, "LONGER", 1.5)
        run.go(0.5)
        before = run.rate()
        said = run.go(900)
        assert [d.kind for _, d in run.go(150) if d.kind != "more_actors"] == []
    assert run.rate() >= 0.9 * before
    assert len(said) < 200


# ------------------------------------------------------------------ inference servers


def served(deadline: float, waits: float, idle: float, batch: float, busy: float) -> float:
    """Return the deadline that a server with such a load gets; 8 environments ask it."""

    def reports(now: float) -> list[Report]:
        metrics = {"inference_batches": 100 * now, "inference_rows": 800 * batch * now}
        actors = [Report("actor", i, "running", {}, now, {UNANSWERED: waits * now}) for i in range(2)]
        return [*actors, Report("inference", 0, "running", metrics, busy * now, {FOR_MORE: idle * now})]

    span = Span(look(1.0, 0, reports(1.0)), look(5.0, 0, reports(5.0)))
    found = set_deadline(Situation(span, Orders((4, 4), (deadline,)), 4, 4.0), 0)
    return deadline if found is None else found.orders.deadlines_ms[0]


def test_a_deadline_falls_while_actors_wait_for_it_and_rises_while_they_have_time() -> None:
    assert served(2.0, waits=0.6, idle=0.5, batch=0.5, busy=0.4) == 1.0
    assert served(2.0, waits=0.6, idle=0.0, batch=0.5, busy=1.0) == 2.0, "the server is what they wait for"
    assert served(2.0, waits=0.05, idle=0.0, batch=0.25, busy=0.9) == 4.0
    assert served(2.0, waits=0.05, idle=0.0, batch=0.9, busy=0.9) == 2.0, "its batches are large"
    assert served(0.25, waits=0.6, idle=0.5, batch=0.5, busy=0.4) == 0.25
    assert served(16.0, waits=0.05, idle=0.0, batch=0.25, busy=0.9) == 16.0
    assert served(0.0, waits=0.05, idle=0.0, batch=0.25, busy=0.9) == 0.0, "nobody wants it to wait"


def adaptive(begins: Literal["local", "served"], **machine: float) -> Machine:
    return Machine(Fleet(cores=3, actors=3, envs=4, deadlines_ms=(2.0,), begins=begins), **machine)  # type: ignore[arg-type]


def test_inference_moves_to_the_faster_side_within_seconds_and_stays_there() -> None:
    for begins, machine in (
        ("served", adaptive("served", network_s=0.005, server_s=0.03)),
        ("local", adaptive("local", network_s=0.03, server_s=0.005)),
    ):
        said = machine.go(12)
        assert kinds(said) == ["move", "kept"]
        (at, move), (_, kept) = said
        assert at <= 5
        assert (move.role, move.applied) == ("inference", True)
        assert ("actors wait 75% of the time for servers" in move.reason) == (begins == "served")
        assert kept.before is not None
        assert kept.after == pytest.approx(kept.before * 40 / 15, rel=0.05)
        assert move.inference == kept.inference == ("local" if begins == "served" else "served")
        assert (move.because, kept.because) == ("", move.reason)
        assert machine.balancer.orders == Orders((4, 4, 4), (2.0,) if begins == "local" else ())
        assert machine.go(2 * trials.BARRED_S) == [], "the other side has nothing to offer"


def test_a_move_that_does_not_pay_is_taken_back_and_not_repeated_for_a_long_while() -> None:
    machine = adaptive("local", network_s=0.02, server_s=0.02)
    said = machine.go(trials.BARRED_S)
    assert kinds(said) == ["move", "taken_back"], "as fast is not enough"
    assert [decision.inference for _, decision in said] == ["served", "local"]
    assert not machine.balancer.orders.served
    machine.server_s = 0.0
    assert kinds(machine.go(30)) == ["move", "kept"]
    assert machine.balancer.orders.deadlines_ms == (2.0,)


def test_inference_stays_where_it_costs_little_or_the_learner_is_what_counts() -> None:
    assert adaptive("local", network_s=0.004).go(60) == []
    assert adaptive("served", server_s=0.004).go(60) == []
    assert adaptive("local", network_s=0.03, learner=100.0).go(20) == []
    fixed = Machine(Fleet(cores=3, actors=3, envs=4, deadlines_ms=(2.0,)), server_s=0.03)
    assert fixed.go(60) == [], "there is no other way to act"


def test_a_move_is_judged_before_a_straggler_is_relieved() -> None:
    machine = Machine(Fleet(cores=4, actors=3, envs=4, deadlines_ms=(2.0,), begins="local"), units=2, network_s=0.03)
    machine.server_s = 0.05
    assert kinds(machine.go(5)) == ["move"]
    machine.seconds = slow(1, envs=2, times=40)
    said = kinds(machine.go(20))
    assert said.index("taken_back") < said.index("rest")


# ------------------------------------------------------------------ words


def test_the_bottleneck_of_processes_is_the_busiest_kind_and_says_who_waits() -> None:
    shares = {"actor": [0.3, 0.5], "replay": [0.98], "learner": [0.97], "evaluator": [1.0]}
    assert side_by_side(shares) == "replay 98% busy; actors wait 60%"
    assert side_by_side({"actor": [0.9, 1.0], "learner": [0.5]}) == "actors 95% busy; learner waits 50%"
    assert side_by_side({"evaluator": [1.0]}) == ""
    dead = {"actor": [0.0, 0.0], "learner": [0.05]}
    assert side_by_side(dead) == "nobody is busy: all wait (the busiest, learner, waits 95% of the time)"


def test_inline_roles_share_the_time() -> None:
    assert in_turns({"actor": [0.2, 0.2, 0.2], "learner": [0.35]}) == "actor takes 60% of the time"
    assert in_turns({}) == ""


def test_every_kind_of_decision_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    found = [kind for part in get_args(get_type_hints(Decision)["kind"]) for kind in (get_args(part) or (part,))]
    assert len(found) == 11
    assert [kind for kind in found if f"`{kind}`" not in page] == []
