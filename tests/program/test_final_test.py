"""The final test: what an environment does there costs no run, it is told how far it is, and it scores as ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fatal_env import HARM, FatalEnv
from program_cases import short

import qfleet
from qfleet import playing, session, setups
from qfleet.core import seeding
from qfleet.core.errors import CheckpointError, EnvironmentFault, RoleFailure
from qfleet.core.protocols import Incident, Report
from qfleet.core.shared_memory import shared_memory_root
from qfleet.core.types import Evaluated, Version
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, with_changes
from qfleet.observe.sinks import read_jsonl
from qfleet.observe.text import sentence
from qfleet.runtime import ownership
from qfleet.runtime.memory import NoRoom


def harmed(folder: Path, harm: str, times: int, **changes: Any) -> Experiment:
    """A run whose environment does harm in one of the episodes of the final test alone."""
    (folder / "count").mkdir()
    seeds = seeding.episode_seeds(0, "test", 4)
    kwargs = {"harm": harm, "fatal": seeds[2], "times": times, "folder": str(folder / "count")}
    settings = {
        "placement": "processes",
        "env.id": "fatal_env:Fatal-v0",
        "env.kwargs": kwargs,
        "env.reward_scale": 1.0,
        "network.input.scale": [1.0],
        "env_steps": 600,
        "evaluation.every": 250,
        "evaluation.test_episodes": 4,
    }
    return short(**{**settings, **changes})


def events_of(directory: Path, *names: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(directory / "events.jsonl") if event["event"] in names]


RAISED = ("raises", "leaves")


@pytest.mark.parametrize("harm", [name for name in HARM if name not in ("sleeps", *RAISED)])
def test_what_an_environment_does_in_the_final_test_costs_no_run(harm: str, tmp_path: Path) -> None:
    """A segfault or an exit ended the whole run, without a summary."""
    done = qfleet.train(harmed(tmp_path, harm, times=2), run_dir=tmp_path / "run")
    assert done.summary["eval"] == {**done.summary["eval"], "mean": 5.0, "episodes": 4}
    deaths = events_of(done.dir, "restart")
    assert [(death["role"], death["life"]) for death in deaths] == [("test", 1), ("test", 2)]


@pytest.mark.parametrize("harm", RAISED)
def test_what_an_environment_raises_there_costs_one_episode(harm: str, tmp_path: Path) -> None:
    """Where one step in five hundred raised, no test of a hundred episodes ever came to its end."""
    done = qfleet.train(harmed(tmp_path, harm, times=10**6), run_dir=tmp_path / "run")
    assert done.summary["eval"] == {**done.summary["eval"], "mean": 5.0, "episodes": 4}
    assert not events_of(done.dir, "restart")
    told = [event["text"] for event in events_of(done.dir, "notice") if event["role"] == "test"]
    assert len(told) == 2, "from its own seed it was tried twice, then another one was played"
    assert all("Its episode is cut, and it begins anew." in text for text in told)


def test_a_final_test_that_never_ends_well_says_how_to_make_it_anew(tmp_path: Path) -> None:
    run = harmed(tmp_path, "segfaults", times=2, **{"survival.restarts": 1})
    with pytest.raises(RoleFailure) as caught:
        qfleet.train(run, run_dir=tmp_path / "run")
    assert caught.value.role == "test"
    assert "was killed by SIGSEGV" in caught.value.cause
    assert "`qfleet resume` goes on from there to its test" in caught.value.cause
    assert qfleet.resume(tmp_path / "run").summary["eval"]["mean"] == 5.0


def test_it_begins_anew_as_often_as_is_allowed_however_long_it_took(tmp_path: Path) -> None:
    """A first life of more than ten seconds did not count."""
    said = [Incident("test", 0, "it died", life, 1.0) for life in (1, 2)]
    placement = FakePlacement(said)
    with pytest.raises(RoleFailure, match="it died; that was death 2"):
        playing._scores(placement, placement, playing.Progress(4, lambda event: None), lambda: False, restarts=1)
    assert placement.rounds == 2


def test_a_death_after_its_scores_were_told_does_not_take_them_back(tmp_path: Path) -> None:
    class Dying(FakePlacement):
        def advance(self) -> None:
            raise RoleFailure("test", 0, "its process was killed", died=True)

        def receive(self) -> Evaluated | None:
            self.rounds += 1
            scores = np.array([3.0, 4.0])
            return Evaluated(Version(), 0, scores, np.ones(2, np.int64), 0.0, False, None) if self.rounds == 1 else None

    dying = Dying([])
    scores = playing._scores(dying, dying, playing.Progress(2, lambda event: None), lambda: False, restarts=0)
    assert scores.tolist() == [3.0, 4.0]


class FakePlacement:
    """A test that dies once in each round, and the stream of what it says."""

    done = False

    def __init__(self, said: list[Incident]) -> None:
        self._said, self.rounds = said, 0

    def advance(self) -> None:
        self.rounds += 1

    def incidents(self) -> list[Incident]:
        return [self._said[self.rounds - 1]]

    def reports(self) -> list[Report]:
        return [Report("test", 0, "evaluating", {}, 0.0, {})]

    def receive(self) -> Evaluated | None:
        return None


def test_inline_the_error_is_raised_at_once_with_its_stack(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="ZeroDivisionError") as caught:
        qfleet.train(harmed(tmp_path, "raises", times=2, placement="inline"), run_dir=tmp_path / "run")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_final_test_that_hangs_ends_with_ctrl_c_and_leaves_a_summary_and_no_process(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (sleeper.exists() and sleeper.read_text()):
            time.sleep(0.02)
        for _ in range(3):  # impatient: that does not cut short what ends the processes
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.7)

    run, sleeper = harmed(tmp_path, "sleeps", times=1), tmp_path / "count" / "0"
    threading.Thread(target=interrupt, daemon=True).start()
    done = qfleet.train(run, run_dir=tmp_path / "run")
    assert (done.summary["stopped_by"], done.summary["eval"]) == ("interrupt", None)
    assert events_of(done.dir, "stopped")
    assert not Path(f"/proc/{sleeper.read_text()}").exists()


def test_ctrl_c_while_its_process_is_ended_costs_no_score_and_leaves_no_shared_memory(tmp_path: Path) -> None:
    """The process was killed, what it shared with the run stayed, and its scores were lost."""

    def interrupt() -> None:
        while not (tmp_path / "closing").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    run = harmed(tmp_path, "", times=0)
    run = with_changes(run, {"env.kwargs": {**run.env.kwargs, "close_s": 1.0}})
    before = own_folders()
    threading.Thread(target=interrupt, daemon=True).start()
    done = qfleet.train(run, run_dir=tmp_path / "run")
    assert done.summary["eval"]["mean"] == 5.0
    assert own_folders() == before


def test_inline_a_second_ctrl_c_ends_an_environment_that_takes_long_to_close(tmp_path: Path) -> None:
    """Only the first one was heeded, so that one that never closes had to be killed."""

    def interrupt() -> None:
        for there in (tmp_path / "count" / "0", tmp_path / "closing"):
            while not there.exists():
                time.sleep(0.02)
            time.sleep(0.7)
            os.kill(os.getpid(), signal.SIGINT)

    run = harmed(tmp_path, "sleeps", times=1, placement="inline")
    run = with_changes(run, {"env.kwargs": {**run.env.kwargs, "close_s": 10.0}})
    threading.Thread(target=interrupt, daemon=True).start()
    done = qfleet.train(run, run_dir=tmp_path / "run")
    assert (done.summary["stopped_by"], done.summary["eval"]) == ("interrupt", None)
    assert not (tmp_path / "closed").exists()


def test_a_run_that_is_to_end_does_not_look_at_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that could not be loaded ended it without a summary."""

    def broken(*anything: Any) -> Any:
        raise CheckpointError("the model is gone")

    def interrupt(metrics: Any, stop: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(session, "load_model", broken)
    on = qfleet.Callbacks(on_evaluation=interrupt)
    done = qfleet.train(short(), run_dir=tmp_path / "run", callbacks=on)
    assert (done.summary["stopped_by"], done.summary["eval"]) == ("interrupt", None)


@pytest.mark.parametrize("placement", ["processes", "inline"])
def test_a_test_of_a_run_outside_the_main_thread_ends_when_it_is_asked_to(placement: str, tmp_path: Path) -> None:
    """No signal can cut in there, and nobody looked."""
    run = harmed(tmp_path, "", times=0, placement=placement, **{"evaluation.test_episodes": 100_000})
    done: list[Any] = []
    directory = tmp_path / "run"
    thread = threading.Thread(target=lambda: done.append(qfleet.train(run, run_dir=directory)), daemon=True)
    thread.start()
    while thread.is_alive() and not ((directory / "events.jsonl").exists() and events_of(directory, "testing")):
        time.sleep(0.05)
    assert thread.is_alive(), "its error is shown above"
    ownership.request_end(directory)
    thread.join(60)
    assert (done[0].summary["stopped_by"], done[0].summary["eval"]) == ("interrupt", None)


def own_folders() -> set[str]:
    return {folder.name for folder in shared_memory_root().iterdir() if f"-{os.getpid()}-" in folder.name}


def test_an_environment_that_is_lost_in_the_final_test_is_told(tmp_path: Path) -> None:
    run = harmed(tmp_path, "is killed", times=1, **{"env.vectorisation": "async"})
    done = qfleet.train(run, run_dir=tmp_path / "run")
    assert done.summary["eval"]["mean"] == 5.0
    (notice,) = [event for event in events_of(done.dir, "notice") if event["role"] == "test"]
    assert (notice["kind"], "was killed by SIGKILL" in notice["text"]) == ("environment", True)


@pytest.mark.xdist_group("ray")
def test_on_ray_it_is_played_with_classes_and_functions_that_no_module_has(tmp_path: Path) -> None:
    """Training takes them there, and then the run ended without its scores."""

    def harmless() -> FatalEnv:
        return FatalEnv()

    settings = {"env_steps": 600, "learner.learning_starts": 200, "evaluation.every": 300, "replay.capacity": 2000}
    few = {"evaluation.episodes": 2, "evaluation.test_episodes": 4, "actors": 1}
    done = qfleet.train(env=harmless, placement="ray", run_dir=tmp_path / "run", **settings, **few)
    assert done.summary["eval"] == {**done.summary["eval"], "mean": 5.0, "episodes": 4}


def test_whatever_keeps_the_test_from_being_played_the_run_is_said_to_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*anything: Any) -> Any:
        raise NoRoom(needed=2**40, free=2**20, root=tmp_path)

    monkeypatch.setattr(playing, "_placed", full)
    with pytest.raises(RoleFailure, match=r"The run and its model are saved: `qfleet resume` goes on"):
        qfleet.train(short(placement="processes"), run_dir=tmp_path / "run")


def test_as_many_episodes_as_a_final_test_may_have_can_be_played_in_a_process() -> None:
    """More than an evaluation may have ended the run when all its training was done."""
    most = 100_000
    experiment = short(placement="processes", **{"evaluation.test_episodes": most})
    setup = setups.test_setup(experiment, env_spec(experiment.env), UserCode())
    assert setup.evaluation.episodes == most


def test_in_lock_step_a_step_of_the_test_does_not_take_long_either() -> None:
    """It was a hundred ticks, however long, and who took ten minutes for them was taken for dead."""
    experiment = short(placement="processes", lockstep=True)
    setup = setups.test_setup(experiment, env_spec(experiment.env), UserCode())
    assert setup.longest_step_s == setups.EVALUATING_S


def test_progress_is_told_a_hundred_times_at_most_and_begins_anew_with_the_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(playing, "_TELL_S", 0.0)
    told: list[int] = []
    progress = playing.Progress(1000, lambda event: told.append(event["played"]))
    for played in range(500):
        progress.tell(played)
    assert told == list(range(0, 500, 10))
    progress.begin_anew()
    progress.tell(10)
    assert told[-2:] == [0, 10]


def test_inline_it_is_asked_before_each_tick_whether_to_end(tmp_path: Path) -> None:
    """It was at every hundredth only, of which each may take a second."""
    done = qfleet.train(short(env_steps=600), run_dir=tmp_path / "run")
    asked: list[int] = []
    ends = lambda: len(asked) >= 3 or bool(asked.append(1))  # noqa: E731
    experiment, network = short(env_steps=600), qfleet.load(done.dir).network
    with pytest.raises(KeyboardInterrupt):
        playing.play_here(experiment, UserCode(), network, 4, 0, "test", asked=ends)
    assert len(asked) == 3


def test_in_a_process_the_model_scores_what_it_scores_here(tmp_path: Path) -> None:
    experiment = short(placement="processes", **{"evaluation.test_episodes": 7, "evaluation.epsilon": 0.1})
    done = qfleet.train(experiment, seed=3, run_dir=tmp_path / "run")
    network = qfleet.load(done.dir).network
    here = playing.play_here(experiment, UserCode(), network, 7, 3, "test")
    assert done.summary["eval"]["mean"] == pytest.approx(float(np.mean(here)), abs=0)


@pytest.mark.parametrize("placement", ["inline", "processes"])
def test_it_is_told_when_it_begins_and_how_far_it_is(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playing, "_TELL_S", 0.0)
    experiment = short(placement=placement, **{"evaluation.test_episodes": 400, "evaluation.envs": 2})
    told = events_of(qfleet.train(experiment, run_dir=tmp_path / "run").dir, "testing", "finished")
    assert told.pop()["event"] == "finished"
    played = [event["played"] for event in told]
    assert played[0] == 0
    assert len(played) > 1
    assert played == sorted(set(played))
    assert played[-1] <= 400
    assert sentence(told[0]) == "testing: 0 of 400 episodes of the final test are played"
