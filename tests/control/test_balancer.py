"""What the balancer sees, says and does not repeat, and how the bottleneck is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.control import balancer
from qfleet.control.balancer import Balancer, Decision
from qfleet.control.bottleneck import in_turns, side_by_side
from qfleet.core.protocols import Report


def report(
    kind: str, index: int, busy_s: float, steps: float | None = None, idle: str = "", phase: str = "running"
) -> Report:
    metrics = {} if steps is None else {"env_steps": steps}
    return Report(kind, index, phase, metrics, busy_s, {}, idle)


class Run:
    """Roles that work at given rates, looked at ten times a second."""

    def __init__(self, cores: float = 2.0) -> None:
        self.balancer = Balancer(cores)
        self.now = 0.0
        self.steps: dict[int, float] = {}
        self.busy: dict[tuple[str, int], float] = {}

    def go(
        self, seconds: float, rates: list[float], actor: float = 0.5, learner: float = 0.5
    ) -> list[tuple[float, Decision]]:
        found = []
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            for role, share in [(("actor", i), actor) for i in range(len(rates))] + [(("learner", 0), learner)]:
                self.busy[role] = self.busy.get(role, 0.0) + 0.1 * share
            for index, rate in enumerate(rates):
                self.steps[index] = self.steps.get(index, 0.0) + 0.1 * rate
            reports = [
                report(kind, index, busy, self.steps[index] if kind == "actor" else None, "its stream is full")
                for (kind, index), busy in self.busy.items()
            ]
            found += [(self.now, decision) for decision in self.balancer.observe(self.now, reports)]
        return found


def test_a_straggler_is_named_within_five_seconds_with_what_holds_it_up() -> None:
    run = Run()
    assert run.go(10, [100, 100, 100]) == []
    ((at, decision),) = run.go(10, [100, 10, 100])
    assert at <= 15
    assert (decision.kind, decision.role, decision.index) == ("straggler", "actor", 1)
    assert "held up by: its stream is full" in decision.reason


def test_it_is_named_once_until_it_has_recovered() -> None:
    run = Run()
    run.go(5, [100, 100, 100])
    kinds = [decision.kind for _, decision in run.go(60, [100, 10, 100])]
    assert kinds == ["straggler"]
    assert run.go(20, [100, 60, 100]) == [], "between the two limits nothing is said"
    assert [decision.kind for _, decision in run.go(20, [100, 100, 100])] == ["recovered"]
    assert [decision.kind for _, decision in run.go(20, [100, 30, 100])] == ["straggler"]


@given(st.lists(st.floats(51, 100), min_size=2, max_size=8))
@settings(max_examples=40, deadline=None)
def test_actors_that_are_about_equally_fast_are_left_in_peace(rates: list[float]) -> None:
    assert Run().go(12, rates) == []


@given(st.lists(st.floats(80, 120), min_size=3, max_size=8), st.data())
@settings(max_examples=40, deadline=None)
def test_whoever_is_far_behind_is_named_and_nobody_else(rates: list[float], data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, len(rates) - 1))
    rates[slow] = data.draw(st.floats(0, 35))
    assert [(d.kind, d.index) for _, d in Run().go(12, rates)] == [("straggler", slow)]


def test_one_actor_or_none_at_work_has_nobody_to_be_compared_with() -> None:
    assert Run().go(10, [5]) == []
    assert Run().go(10, [0, 0, 0]) == []


def test_roles_that_are_starting_are_not_judged() -> None:
    watching = Balancer(2)
    for tick in range(100):
        now = 0.1 * tick
        late = report("actor", 2, 0.0, 0.0, phase="starting")
        assert watching.observe(now, [report("actor", i, now, 100 * now) for i in range(2)] + [late]) == []


def test_one_more_actor_is_advised_where_cores_are_free_and_seldom() -> None:
    said = Run(cores=4).go(balancer.COOL_DOWN_S - 1, [100, 100], actor=1.0, learner=0.3)
    ((_, decision),) = said
    assert decision.kind == "more_actors"
    assert "--actors 3 would be faster" in decision.reason
    assert Run(cores=2).go(20, [100, 100], actor=1.0, learner=0.3) == [], "no core is free"
    assert Run(cores=8).go(20, [100, 100], actor=1.0, learner=0.9) == [], "the learner does not wait"
    assert Run(cores=8).go(20, [100, 100], actor=0.7, learner=0.3) == [], "the actors wait too"


def test_the_bottleneck_of_processes_is_the_busiest_kind_and_says_who_waits() -> None:
    shares = {"actor": [0.3, 0.5], "replay": [0.98], "learner": [0.97], "evaluator": [1.0]}
    assert side_by_side(shares) == "replay 98% busy; actors wait 60%"
    assert side_by_side({"actor": [0.9, 1.0], "learner": [0.5]}) == "actors 95% busy; learner waits 50%"
    assert side_by_side({"evaluator": [1.0]}) == ""


def test_inline_roles_share_the_time() -> None:
    assert in_turns({"actor": [0.2, 0.2, 0.2], "learner": [0.35]}) == "actor takes 60% of the time"
    assert in_turns({}) == ""


@pytest.mark.parametrize("kind", ["straggler", "recovered", "more_actors"])
def test_every_kind_of_decision_is_documented(kind: str) -> None:
    assert f"`{kind}`" in (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
