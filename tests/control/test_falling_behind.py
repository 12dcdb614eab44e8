"""Environments that hold up the others of their actor: named in time, also where there is one actor, and no others."""

from __future__ import annotations

import pytest
from balance_cases import TICK_S, Machine, kinds

from qfleet.control.balancer import Fleet
from qfleet.control.stragglers import LASTING_S

ONE = Fleet(cores=1, actors=1, envs=8)


def slow(env: int, times: float = 10) -> dict[tuple[int, int], float]:
    return {(0, env): 0.01 * times}


@pytest.mark.parametrize("fleet", [ONE, Fleet(cores=1, actors=1, envs=2), Fleet(cores=1, actors=1, envs=8, fixed=True)])
def test_the_slow_environment_of_a_single_actor_is_named_within_five_seconds_with_what_would_help(fleet: Fleet) -> None:
    run = Machine(fleet)
    assert run.go(10) == []
    run.seconds = slow(1)
    ((at, decision),) = run.go(60)
    assert at <= 15
    assert (decision.kind, decision.role, decision.index, decision.applied) == ("straggler", "actor", 0, False)
    assert f"its environment 1 of {fleet.envs} takes 10 times as long as the fastest quarter" in decision.reason
    assert decision.reason.count("--env.vectorisation async --actor.groups 2") == 1
    run.seconds = {}
    assert kinds(run.go(20)) == ["recovered"]


def test_several_slow_environments_of_an_actor_are_counted() -> None:
    run = Machine(ONE, seconds={(0, env): 0.04 for env in (2, 5, 6)})
    ((_, decision),) = run.go(10)
    words = "3 of its 8 environments, 2 the first of them, take 4 times as long as the fastest quarter: --env."
    assert words in decision.reason


def test_it_rests_where_it_can_and_the_run_is_faster_and_it_is_tried_again() -> None:
    run = Machine(ONE, units=8)
    run.go(10)
    run.seconds = slow(5)
    said = run.go(20)
    assert kinds(said) == ["straggler", "rest", "recovered", "kept"]
    assert said[0][0] <= said[1][0] <= 15
    assert "--env.vectorisation" not in said[0][1].reason, "it can rest as things are"
    assert "1 of its 8 environments rest" in said[1][1].reason
    assert run.balancer.orders.envs == (7,)
    assert run.rate() == pytest.approx(700)
    run.seconds = {}
    assert kinds(run.go(150)) == ["return", "kept"]
    assert run.balancer.orders.envs == (8,)


def test_a_rest_that_makes_its_actor_no_faster_is_taken_back() -> None:
    run = Machine(ONE, units=8)
    run.potential = lambda: run.lines[0].awake.sum(keepdims=True) * 90.0  # type: ignore[method-assign]  # waits for none
    run.seconds = slow(5)
    assert kinds(run.go(20))[:4] == ["straggler", "rest", "recovered", "taken_back"]
    assert run.balancer.orders.envs == (8,)


def test_a_slow_environment_is_named_beside_other_actors_that_have_one_too() -> None:
    run = Machine(Fleet(cores=3, actors=3, envs=4), seconds={(actor, 2): 0.1 for actor in range(3)})
    said = run.go(10)
    assert [(decision.kind, decision.index) for _, decision in said] == [("straggler", actor) for actor in range(3)]


def test_environments_that_are_slow_by_turns_are_left_in_peace() -> None:
    run = Machine(ONE, units=8)
    for turn in range(60):
        run.seconds = slow(turn % 8)
        assert run.go(LASTING_S / 2) == []


def test_one_that_is_slow_for_a_moment_is_left_in_peace() -> None:
    run = Machine(ONE, units=8)
    for _ in range(10):
        run.seconds = slow(3)
        assert run.go(LASTING_S - TICK_S) == []
        run.seconds = {}
        assert run.go(5) == []


def test_one_that_is_named_is_so_once_until_it_has_been_even_for_a_while() -> None:
    run = Machine(ONE, seconds=slow(3))
    assert kinds(run.go(10)) == ["straggler"]
    for _ in range(10):  # about as slow as slow ones are
        run.seconds = slow(3, times=2.9)
        assert run.go(LASTING_S / 2) == []
        run.seconds = slow(3, times=3.1)
        assert run.go(LASTING_S / 2) == []
    run.seconds = slow(3, times=2.9)
    assert kinds(run.go(5)) == ["recovered"]


def test_one_that_costs_little_is_left_in_peace() -> None:
    """Where others take most of the time, such as the learner, it does not matter."""
    assert Machine(ONE, units=8, learner=5.0, seconds=slow(3)).go(60) == []
    assert kinds(Machine(ONE, units=8, learner=50.0, seconds=slow(3)).go(5)) == ["straggler", "rest"]
