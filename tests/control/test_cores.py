"""How busy cores are said to be, and what follows for the bottleneck and for those who look for free ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from plan_cases import experiment

from qfleet.control import cores as cores_module
from qfleet.control import progress as progress_module
from qfleet.control.bottleneck import Load, side_by_side
from qfleet.control.cores import Cores
from qfleet.control.levers import Situation
from qfleet.control.progress import Progress
from qfleet.control.sights import Span, look
from qfleet.core.protocols import Report
from qfleet.core.types import Orders


def burn(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_work_of_this_process_is_seen() -> None:
    found = Cores()
    began = time.monotonic()
    burn(0.3)
    share = found.busy()
    assert share is not None
    assert 0.2 / (time.monotonic() - began) / found.count < share <= 1.0


def test_a_containers_time_is_counted_against_its_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "cpu.stat"
    monkeypatch.setattr(cores_module, "_CONTAINER", stat)
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 0.5)
    now = 10.0
    monkeypatch.setattr(cores_module.time, "monotonic", lambda: now)
    stat.write_text("usage_usec 1000000\nuser_usec 900000\n")
    found = Cores()
    now, _ = 12.0, stat.write_text("usage_usec 1600000\nuser_usec 1\n")
    assert found.busy() == pytest.approx(0.6), "0.6 s of the 1 s that half a core gives in 2 s"
    now, _ = 13.0, stat.write_text("nothing that is known\n")
    assert found.busy() is None
    now = 14.0
    assert found.busy() is None, "there is nothing to compare with"


def test_full_cores_come_first_with_those_who_have_them() -> None:
    shares = {"actor": [0.8] * 16, "learner": [0.86]}
    used = {"actor": 13.4, "learner": 0.9, "replay": 0.3}
    full = side_by_side(shares, Load(16, 0.92, used))
    assert full == "cores 92% busy (actor 13.4, learner 0.9 of 16); learner 86% busy; actors wait 20%"
    assert side_by_side(shares, Load(16, 0.89, used)) == side_by_side(shares) == "learner 86% busy; actors wait 20%"
    others = side_by_side(shares, Load(16, 1.0, {"actor": 0.1}))
    assert others == "cores 100% busy (others 15.9 of 16); learner 86% busy; actors wait 20%"
    early = side_by_side(shares, Load(16, 1.0, {}))
    assert early == "cores 100% busy; learner 86% busy; actors wait 20%", "nobody knows yet whose work it is"


def test_a_run_that_has_come_to_its_end_says_who_still_works() -> None:
    shares = {"actor": [0.0, 0.0], "learner": [0.1], "evaluator": [1.0]}
    assert side_by_side(shares) == "evaluator 100% busy; all others wait"


def test_nobody_is_held_up_before_learning_begins() -> None:
    now = 0.0
    progress = Progress(experiment(**{"learner.learning_starts": 5000}), lambda: now)
    now = 1.0
    reports = [Report("actor", 0, "running", {}, 0.9, {}, cpu_s=1.0)]
    early, late = (progress.record(reports, steps, updates, 1.0) for steps, updates in ((400, 0), (5004, 1)))
    assert early["bottleneck"] == "none yet: learning begins at 5,000 steps"
    assert "eta_s" not in early, "it goes on at another speed"
    assert "none yet" not in late["bottleneck"]
    assert "eta_s" in late


def test_a_record_has_the_cores_of_each_role_and_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cores, "busy", lambda self: 0.95)
    now = 0.0
    progress = Progress(experiment(), lambda: now)
    assert progress_module.Cores is Cores
    reports = [Report("actor", 0, "running", {}, 0.0, {}, cpu_s=5.0), Report("replay", 1, "running", {}, 0.0, {})]
    first = progress.record(reports, 0, 0, 0.0)
    assert "actor.0.cores" not in first, "it would have what it took to begin"
    now = 2.0
    reports = [Report("actor", 0, "running", {}, 1.5, {}, cpu_s=8.0), Report("replay", 1, "running", {}, 0.0, {})]
    record = progress.record(reports, 5000, 1, 2.0)
    assert record["actor.0.cores"] == pytest.approx(1.5)
    assert record["cores_busy"] == 0.95
    assert "replay.1.cores" not in record, "it is in the process of another"
    assert record["bottleneck"].startswith("cores 95% busy (actor 1.5")


def test_a_role_that_is_begun_anew_has_not_used_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    progress = Progress(experiment(), lambda: now)
    progress.record([Report("actor", 0, "running", {}, 9.0, {}, cpu_s=9.0)], 0, 0, 0.0)
    now = 1.0
    assert progress.record([Report("actor", 0, "running", {}, 0.1, {}, cpu_s=0.1)], 0, 0, 1.0)["actor.0.cores"] == 0


@pytest.mark.parametrize("placement", ["inline", "ray"])
def test_several_machines_and_one_process_have_no_load_of_a_machine(placement: str) -> None:
    now = 0.0
    progress = Progress(experiment(placement=placement), lambda: now)
    now = 1.0
    assert "cores_busy" not in progress.record([Report("actor", 0, "running", {}, 0.5, {})], 0, 0, 1.0)


def test_environments_in_threads_leave_fewer_cores_free_than_their_actors() -> None:
    """Six actors of games in threads kept 12 of 16 cores busy, and ten passed for free."""

    def at(seconds: float) -> list[Report]:
        return [Report("actor", i, "running", {}, 0.8 * seconds, {}, cpu_s=2.0 * seconds) for i in range(6)]

    seen = Situation(Span(look(0.0, 0, at(0.0)), look(10.0, 0, at(10.0))), Orders((8,) * 6), 8, 16.0)
    assert seen.free_cores == pytest.approx(4.0)


def test_roles_that_share_a_process_need_its_cores_once() -> None:
    def at(now: float) -> list[Report]:
        host = Report("replay", 0, "running", {}, 0.8 * now, {}, cpu_s=0.8 * now)
        return [host, *(Report("replay", part, "running", {}, 0.2 * now, {}, host=0) for part in (1, 2, 3))]

    used = Span(look(0.0, 0, at(0.0)), look(10.0, 0, at(10.0))).cores("replay")
    assert sum(used.values()) == pytest.approx(0.8)
