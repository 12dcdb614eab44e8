"""What roles survive: steps that hang and errors that environments raise, as long and as often as the user says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from numbered_env import NumberedEnv
from program_cases import short
from test_kills import experiment, lives, survive

import qfleet.api as api
from qfleet.core.errors import EnvironmentFault, RoleFailure
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import Experiment
from qfleet.observe.sinks import read_jsonl
from qfleet.program import build_program, place
from qfleet.runtime import reviving


@pytest.mark.parametrize(
    ("placement", "name"), [("processes", "processes.ProcessPlacement"), ("ray", "ray.RayPlacement")]
)
def test_what_is_survived_is_the_users_to_say(
    placement: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(placement if placement == "ray" else "qfleet")
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(f"qfleet.runtime.{name}", lambda graph, **rest: given.append(rest))
    run = short(placement=placement, survival={"stall_s": 700.0, "restarts": 9})
    place(build_program(run, env_spec(run.env), UserCode(), tmp_path), run)
    ((stall, restarts),) = [(rest["stall"], rest["restarts"]) for rest in given]
    assert (stall, restarts) == (700.0, 9)


def test_a_step_that_takes_longer_than_the_setting_allows_is_a_hang_that_names_it(tmp_path: Path) -> None:
    kwargs = {"journal": str(tmp_path / "journal"), "hang_at": 20}
    run = experiment(tmp_path, 600, actors=1, **{"env.kwargs": kwargs, "survival.stall_s": 2.0})
    done = api.train(run, run_dir=tmp_path / "run")
    assert done.summary["env_steps"] >= 600
    (death,) = [event for event in read_jsonl(done.dir / "events.jsonl") if event["event"] == "restart"]
    assert death["cause"].startswith("it hung: ")
    assert death["cause"].endswith(" s in one step, in phase 'running' (survival.stall_s 2)")


WORDS = "raised ZeroDivisionError: the robot fell over"


def raising(folder: Path, env_steps: int, at: int, **changes: Any) -> Experiment:
    kwargs = {"journal": str(folder / "journal"), "raise_at": at}
    return experiment(folder, env_steps, **{"env.kwargs": {**kwargs, **changes.pop("kwargs", {})}, **changes})


OTHERS = ({"inference.kind": "served"}, {"env.autoreset": "next_step"})


@pytest.mark.parametrize("changes", [{}, *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)], ids=str)
def test_what_an_environment_raises_costs_open_episodes_and_nothing_that_was_acknowledged(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the whole run."""
    found, deaths = survive(raising(tmp_path, 2500, at=200, **changes), tmp_path, monkeypatch)
    assert {death["role"] for death in deaths} == {"actor"}
    assert lives(deaths) >= 5
    assert all(WORDS in death["cause"] for death in deaths)
    assert found.sent > 2000
    assert found.stored == found.sent


@pytest.mark.slow
def test_what_an_environment_raises_on_ray_costs_open_episodes_only(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, deaths = survive(raising(tmp_path, 1500, at=200, placement="ray"), tmp_path, monkeypatch)
    assert lives(deaths) >= 3
    assert found.stored == found.sent > 1200


def test_an_environment_that_raises_seldom_ends_no_run(tmp_path: Path) -> None:
    done = api.train(raising(tmp_path, 1500, at=350), run_dir=tmp_path / "run")
    events = read_jsonl(done.dir / "events.jsonl")
    causes = [event["cause"] for event in events if event["event"] == "restart"]
    assert causes
    assert all(WORDS in cause and not cause.endswith(".") for cause in causes)
    assert done.summary["env_steps"] >= 1500


def test_an_evaluation_begins_anew_after_a_fault(tmp_path: Path) -> None:
    one = {"evaluation.every": 300, "evaluation.episodes": 1, "evaluation.envs": 1}
    done = api.train(raising(tmp_path, 1500, at=50, kwargs={"raise_in": "evaluator-"}, **one), run_dir=tmp_path / "run")
    events = read_jsonl(done.dir / "events.jsonl")
    assert {event["role"] for event in events if event["event"] == "restart"} == {"evaluator"}
    assert len([event for event in events if event["event"] == "evaluation"]) >= 4


def test_an_evaluation_that_never_comes_to_an_end_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each try took longer than ten seconds the evaluator was begun anew for ever, long after the last step."""
    monkeypatch.setattr(reviving, "_QUICK_S", 1e-9)
    kwargs = {"kwargs": {"raise_in": "evaluator-"}, "survival.restarts": 2, "evaluation.every": 300}
    with pytest.raises(RoleFailure) as caught:
        api.train(raising(tmp_path, 10**6, at=5, **kwargs), run_dir=tmp_path / "run")
    assert caught.value.role == "evaluator"
    assert WORDS in caught.value.cause
    assert "that was death 3 in a row" in caught.value.cause


def test_faults_after_short_lives_end_the_run_in_the_environments_words_and_say_what_would_help(tmp_path: Path) -> None:
    run = raising(tmp_path, 1500, at=5, actors=1, **{"survival.restarts": 2})
    with pytest.raises(RoleFailure) as caught:
        api.train(run, run_dir=tmp_path / "run")
    assert (caught.value.role, caught.value.index) == ("actor", 0)
    assert WORDS in caught.value.cause
    assert caught.value.cause.endswith(
        "; that was death 3 in a row after little or no work (survival.restarts 2); "
        "with --env.vectorisation async such a fault costs one environment's episode only"
    )


def test_an_environment_that_never_makes_a_step_ends_the_run_at_its_second_try(tmp_path: Path) -> None:
    with pytest.raises(RoleFailure, match=r"the robot fell over .* may show where; that was the second try$"):
        api.train(raising(tmp_path, 1500, at=1), run_dir=tmp_path / "run")


def test_inline_an_environments_error_is_raised_at_once_with_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumberedEnv, "_taken", itertools.count(1))
    run = raising(tmp_path, 1500, at=30, placement="inline", actors=1, kwargs={"raise_in": ""})
    with pytest.raises(EnvironmentFault, match="the robot fell over") as caught:
        api.train(run, run_dir=tmp_path / "run")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
