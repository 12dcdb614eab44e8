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
    run = experiment(tmp_path, 600, actors=1, **{"env.kwargs": kwargs, "survival.stall_s": 5.0})
    done = api.train(run, run_dir=tmp_path / "run")
    assert done.summary["env_steps"] >= 600
    (death,) = [event for event in read_jsonl(done.dir / "events.jsonl") if event["event"] == "restart"]
    assert death["cause"].startswith("it hung: ")
    assert death["cause"].endswith(" s in one step, in phase 'running' (survival.stall_s 5)")


WORDS = "raised ZeroDivisionError: the robot fell over"


def raising(folder: Path, env_steps: int, at: int, **changes: Any) -> Experiment:
    kwargs = {"journal": str(folder / "journal"), "raise_at": at}
    return experiment(folder, env_steps, **{"env.kwargs": {**kwargs, **changes.pop("kwargs", {})}, **changes})


def losses(run: Path) -> list[str]:
    """What was told of environments that were lost."""
    events = read_jsonl(run / "events.jsonl")
    return [event["text"] for event in events if event["event"] == "notice" and event["kind"] == "environment"]


SERVED = pytest.param({"inference.kind": "served"}, marks=pytest.mark.slow)
ON_RAY = pytest.param({"placement": "ray"}, marks=pytest.mark.slow)


@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("changes", [{}, {"actor.groups": 2}, SERVED, ON_RAY], ids=str)
def test_what_an_environment_raises_costs_its_episode_and_nothing_that_was_acknowledged(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """It ended the whole run, and later the actor with all its open episodes."""
    if changes.get("placement") == "ray":
        request.getfixturevalue("ray_session")
    found, deaths = survive(raising(tmp_path, 2500, at=200, **changes), tmp_path, monkeypatch)
    assert not deaths
    assert len(losses(tmp_path / "run")) >= 5
    assert all(WORDS in text and "Its episode is cut" in text for text in losses(tmp_path / "run"))
    assert found.stored == found.sent > 2000


@pytest.mark.slow
def test_in_a_vector_of_gymnasiums_own_it_costs_the_actors_open_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = raising(tmp_path, 2500, at=200, **{"env.autoreset": "next_step"})
    found, deaths = survive(run, tmp_path, monkeypatch)
    assert {death["role"] for death in deaths} == {"actor"}
    assert lives(deaths) >= 5
    assert all(WORDS in death["cause"] for death in deaths)
    assert found.stored == found.sent > 2000


def test_what_an_environment_raises_in_an_evaluation_costs_its_episode(tmp_path: Path) -> None:
    """On the same seeds it failed each time in the same step, and with the last try the run, unsaved."""
    one = {"evaluation.every": 300, "evaluation.episodes": 1, "evaluation.envs": 1}
    done = api.train(raising(tmp_path, 1500, at=50, kwargs={"raise_in": "evaluator-"}, **one), run_dir=tmp_path / "run")
    events = read_jsonl(done.dir / "events.jsonl")
    assert not [event for event in events if event["event"] == "restart"]
    assert losses(done.dir)
    assert len([event for event in events if event["event"] == "evaluation"]) >= 4


def test_an_evaluation_that_never_comes_to_an_end_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each try took longer than ten seconds the evaluator was begun anew for ever, long after the last step."""
    monkeypatch.setattr(reviving, "_QUICK_S", 1e-9)
    kwargs = {"kwargs": {"raise_in": "evaluator-"}, "survival.restarts": 2, "evaluation.every": 300}
    with pytest.raises(RoleFailure) as caught:
        api.train(raising(tmp_path, 10**6, at=1, **kwargs), run_dir=tmp_path / "run")
    assert caught.value.role == "evaluator"
    assert WORDS in caught.value.cause
    assert "that was death 3 in a row" in caught.value.cause


def test_environments_that_never_end_an_episode_end_the_run_in_their_own_words(tmp_path: Path) -> None:
    run = raising(tmp_path, 1500, at=2, actors=1, **{"survival.restarts": 2})
    with pytest.raises(RoleFailure) as caught:
        api.train(run, run_dir=tmp_path / "run")
    assert (caught.value.role, caught.value.index) == ("actor", 0)
    assert WORDS in caught.value.cause
    assert caught.value.cause.endswith("; that was death 3 in a row after little or no work (survival.restarts 2)")


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


def test_where_the_environment_raises_while_it_is_timed_the_run_goes_on_without_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training survives what ended the planning, and with it the run."""

    def raises(*anything: Any) -> Any:
        raise EnvironmentFault("the robot fell over.")

    monkeypatch.setattr(api, "plan_run", raises)
    run = experiment(tmp_path, 600, actors=1)
    done = api.train(run, run_dir=tmp_path / "run", plan="auto")
    assert done.summary["plan"] is None
    assert done.summary["env_steps"] >= 600
    with pytest.raises(EnvironmentFault, match="fell over"):
        api.train(run.replace(placement="inline"), run_dir=tmp_path / "inline", plan="auto")
