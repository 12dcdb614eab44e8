"""What a run's records say of its roles' speed, and that the balancer's decisions become events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan_cases import experiment

from qfleet.control import balancer
from qfleet.control import monitor as monitor_module
from qfleet.control.balancer import Decision
from qfleet.control.monitor import Callbacks, Monitor
from qfleet.control.progress import Progress
from qfleet.control.steering import Steering
from qfleet.core.protocols import Report
from qfleet.core.saving import Saving
from qfleet.core.types import Orders


def actor(index: int, steps: float, busy_s: float) -> Report:
    return Report("actor", index, "running", {"env_steps": steps}, busy_s, {}, "its stream is full")


def test_rates_and_shares_are_those_since_the_record_before() -> None:
    now = 10.0
    progress = Progress(experiment(), lambda: now)
    learner = Report("learner", 0, "running", {"updates": 5.0}, 1.0, {})
    first = progress.record([actor(0, 50, 0.5), learner], 50, 5, 1.0)
    assert "actor.0.rate" not in first, "there is nothing yet to compare with"
    now = 12.0
    later = Report("learner", 0, "running", {"updates": 25.0}, 2.9, {})
    second = progress.record([actor(0, 250, 1.0), later], 250, 25, 3.0)
    assert (second["actor.0.rate"], second["learner.0.rate"]) == (100.0, 10.0)
    assert second["actor.0.busy"] == pytest.approx(0.25)
    assert second["bottleneck"] == "learner 95% busy; actor waits 75%"


def test_actors_that_sleep_are_not_counted_among_those_that_hold_up() -> None:
    asleep = Report("actor", 1, "running", {"env_steps": 0.0, "acting_envs": 0.0}, 0.0, {}, "not needed now")
    now = 0.0
    progress = Progress(experiment(), lambda: now)
    now = 1.0
    record = progress.record([actor(0, 50, 1.0), asleep], 50, 5, 1.0)
    assert record["bottleneck"] == "actor 100% busy"


def test_parts_of_the_replay_in_one_process_hold_up_together() -> None:
    parts = [Report("replay", part, "running", {}, 0.4, {}, host=host) for part, host in enumerate((None, 0, None))]
    learner = Report("learner", 0, "running", {}, 0.5, {})
    now = 0.0
    progress = Progress(experiment(), lambda: now)
    now = 1.0
    record = progress.record([*parts, learner], 50, 5, 1.0)
    assert record["replay.1.busy"] == pytest.approx(0.4)
    assert record["bottleneck"] == "replays 60% busy; learner waits 50%"


def test_a_record_says_how_many_actors_learners_and_shards_there_are() -> None:
    parts = [Report("replay", part, "running", {}, 0.4, {}, host=host) for part, host in enumerate((None, 0, None))]
    ranks = [Report("learner", rank, "running", {}, 0.5, {}) for rank in range(2)]
    actors = [actor(index, 50, 0.5) for index in (0, 3, 4)]
    record = Progress(experiment(), lambda: 1.0).record([*actors, *parts, *ranks], 50, 5, 1.0)
    assert (record["actors"], record["learners"], record["shards"]) == (3, 2, 2)
    fused = [Report("fused", 0, "running", {}, 0.5, {})]
    record = Progress(experiment(), lambda: 1.0).record(fused, 50, 5, 1.0)
    assert record["learners"] == 1
    assert not {"actors", "shards"} & record.keys()


def test_what_actors_have_lost_is_their_sum() -> None:
    lost = [Report("actor", i, "running", {"cut_episodes": 2.0, "lost_steps": 3.0 * i}, 1.0, {}) for i in range(2)]
    record = Progress(experiment(), lambda: 1.0).record([*lost, actor(2, 50, 1.0)], 50, 5, 1.0)
    assert (record["cut_episodes"], record["lost_steps"]) == (4.0, 3.0)
    given_up = [Report("actor", i, "running", {"given_up_envs": 1.0 + i}, 1.0, {}) for i in range(2)]
    assert Progress(experiment(), lambda: 1.0).record([*given_up, actor(2, 50, 1.0)], 50, 5, 1.0)["given_up_envs"] == 3
    assert "cut_episodes" not in Progress(experiment(), lambda: 1.0).record([actor(0, 50, 1.0)], 50, 5, 1.0)


def test_returns_of_any_stretch_can_be_told_from_their_sum() -> None:
    def ended(index: int, episodes: float, returns: float) -> Report:
        return Report("actor", index, "running", {"episodes": episodes, "return_sum": returns}, 1.0, {})

    progress = Progress(experiment(), lambda: 1.0)
    before = progress.record([ended(0, 2, 10.0), ended(1, 1, -4.0)], 50, 5, 1.0)
    after = progress.record([ended(0, 4, 30.0), ended(1, 2, 6.0)], 100, 5, 1.0)
    returns, episodes = (after[name] - before[name] for name in ("return_sum", "episodes"))
    assert (returns, episodes) == (30.0, 3.0)


class Kept:
    """A sink that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []

    def metrics(self, record: Any) -> None: ...

    def event(self, record: Mapping[str, Any]) -> None:
        self.events.append(record)

    def close(self) -> None: ...


class ThreeActors:
    """A placement whose second actor stands still."""

    name = "processes"

    def __init__(self) -> None:
        self.rounds = 0

    @property
    def done(self) -> bool:
        return self.rounds >= 50

    def advance(self) -> None:
        self.rounds += 1

    def reports(self) -> list[Report]:
        return [actor(index, 0.0 if index == 1 else 100.0 * self.rounds, 0.0) for index in range(3)]

    def incidents(self) -> list[Any]:
        return []

    def pause(self) -> None: ...

    def attend(self, seconds: float) -> None:
        """The last checkpoint is written by a thread, which may be slower than the monitor."""
        time.sleep(seconds)


@pytest.mark.parametrize(("wanted", "placement"), [("on", "processes"), ("off", "processes"), ("on", "inline")])
def test_a_straggler_becomes_an_event_unless_nobody_watches(
    wanted: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balancer, "WINDOW_S", 1e-5)
    monkeypatch.setattr(balancer, "LOOK_S", 0.0)
    sink, counter = Kept(), SimpleNamespace(total=lambda: 0)
    orders: list[Orders] = []
    edge = SimpleNamespace(publish=orders.append)
    handles = SimpleNamespace(events=(), env_steps=counter, updates=counter, samples=counter, orders=edge)
    monitor = Monitor(
        experiment(balance=wanted, placement=placement, actors=3),
        ThreeActors(),  # type: ignore[arg-type]
        handles,
        [sink],
        Callbacks(),
        save=lambda steps, standing, best: Saving(steps, lambda: Path("none"), lambda: None),
    )
    monitor.run()
    found = [event for event in sink.events if event["event"] == "balance"]
    if (wanted, placement) != ("on", "processes"):
        assert (found, orders, monitor.standing.envs) == ([], [], [])
        return
    assert [one.envs for one in orders] == [(16, 16, 16)]
    assert monitor.standing.envs == [16, 16, 16], "saved with the last checkpoint"
    (event,) = found
    assert (event["decision"], event["role"], event["index"], event["applied"]) == ("straggler", "actor", 1, False)
    assert "its stream is full" in event["text"]


def test_a_judgement_becomes_an_event_with_its_cause_and_with_where_inference_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steering = Steering(experiment(placement="processes", **{"inference.kind": "adaptive"}), None)
    judged = Decision("kept", "inference", 0, "move: 10 -> 20 steps/s", False, 10.0, 20.0, "actors wait", "local")
    seen = Decision("recovered", "actor", 1, "80% of the others' median again")
    monkeypatch.setattr(balancer.Balancer, "observe", lambda *rest: [judged, seen])
    first, second = steering.look(0.0, 0, [])
    assert (first["because"], first["inference"], first["before"], first["after"]) == ("actors wait", "local", 10, 20)
    assert second.keys() == {"event", "decision", "role", "index", "text", "applied"}


@pytest.mark.parametrize(("took_s", "forgotten"), [(0.05, []), (0.5, ["stood still"])])
def test_only_a_long_pause_has_the_balancer_forget_what_it_saw(
    took_s: float, forgotten: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checkpoint a second it forgot each time, and never saw enough to decide anything."""
    now, told = [0.0], []
    monkeypatch.setattr(monitor_module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Steering, "stood_still", lambda steering: told.append("stood still"))
    counter = SimpleNamespace(total=lambda: 0)
    orders = SimpleNamespace(publish=lambda orders: None)
    handles = SimpleNamespace(events=(), env_steps=counter, updates=counter, samples=counter, orders=orders)

    def save(steps: int, standing: Any, best: Any) -> Saving:
        now[0] += took_s
        return Saving(steps, lambda: Path("none"), lambda: None)

    run = experiment(balance="on", placement="processes", actors=3)
    monitor = Monitor(run, ThreeActors(), handles, [], Callbacks(), save=save)  # type: ignore[arg-type]
    monitor._begin_saving().join()
    assert told == forgotten
