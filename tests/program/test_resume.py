"""Exact resume: a run cut at any step and resumed ends with the very same bytes as one never cut."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from program_cases import fingerprint, short, stop_at

import qfleet.api as api
from qfleet.experiment import Experiment


def experiment_of(name: str) -> Experiment:
    if name == "pong":
        tiny = {
            "learner.batch_size": 4,
            "learner.learning_starts": 60,
            "env.reseed_every": 100,
            "replay.capacity": 2000,
        }
        steps = {"evaluation.max_episode_steps": 20, "checkpoint.every": 150, "evaluation.every": 200}
        return short("dqn", "atari:pong", env_steps=400, **tiny, **steps, **{"learner.train_period": 16.0})
    return short(name, env_steps=1200)


@cache
def uncut(name: str) -> dict[str, str]:
    return fingerprint(api.train(experiment_of(name), seed=5, run_dir=Path(mkdtemp()) / "uncut"))


def assert_cut_equals_uncut(name: str, cut: int, directory: Path) -> None:
    first = api.train(experiment_of(name), seed=5, run_dir=directory / "cut", callbacks=stop_at(cut))
    assert first.summary["stopped_by"] == "callback"
    resumed = api.resume(directory / "cut")
    assert resumed.summary["resume_grade"] == "exact"
    assert fingerprint(resumed) == uncut(name)


def cut_points(name: str, count: int) -> list[int]:
    rng = random.Random(f"cuts of {name}")
    return [rng.randrange(1, experiment_of(name).env_steps) for _ in range(count)]


@pytest.mark.parametrize("name", ["dqn", "rainbow", "r2d2", "pqn", pytest.param("pong", marks=pytest.mark.slow)])
def test_trap_15_cut_and_resumed_equals_uncut(name, tmp_path):
    for number, cut in enumerate(cut_points(name, 2)):
        assert_cut_equals_uncut(name, cut, tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("name", ["dqn", "rainbow", "r2d2", "pqn", "pong"])
def test_cut_and_resumed_equals_uncut_at_20_points(name, number, tmp_path):
    assert_cut_equals_uncut(name, cut_points(name, 20)[number], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["double", "dueling", "nstep", "prioritised", "noisy", "c51", "qr", "iqn", "munchausen"]
)
def test_every_algorithm_resumes_exactly(name, tmp_path):
    assert_cut_equals_uncut(name, 777, tmp_path)


def test_a_run_cut_three_times_equals_one_never_cut(tmp_path):
    api.train(experiment_of("dqn"), seed=5, run_dir=tmp_path / "cut", callbacks=stop_at(300))
    api.resume(tmp_path / "cut", callbacks=stop_at(310))
    api.resume(tmp_path / "cut", callbacks=stop_at(1000))
    assert fingerprint(api.resume(tmp_path / "cut")) == uncut("dqn")


def test_trap_8_epsilon_goes_on_where_it_was_after_a_resume(tmp_path):
    run = api.train(experiment_of("dqn"), run_dir=tmp_path / "run", callbacks=stop_at(800))
    seen = []
    experiment = experiment_of("dqn")
    api.resume(run.dir, sinks=[_Epsilons(seen)])
    expected = experiment.exploration.at(1200)
    assert seen[-1] == pytest.approx(expected, abs=0.02)
    assert max(seen) < experiment.exploration.start


def test_trap_13_after_a_resume_no_burst_of_updates_is_paid(tmp_path):
    run = api.train(experiment_of("dqn"), run_dir=tmp_path / "run", callbacks=stop_at(800))
    resumed = api.resume(run.dir)
    owed = (resumed.summary["env_steps"] - 200) / experiment_of("dqn").learner.train_period
    assert abs(resumed.summary["updates"] - owed) <= 4


def test_a_finished_run_goes_on_with_a_larger_budget(tmp_path):
    run = api.train(experiment_of("dqn"), run_dir=tmp_path / "run")
    longer = api.resume(run.dir, env_steps=1600)
    assert longer.summary["env_steps"] == 1600
    assert longer.summary["updates"] > run.summary["updates"]


class _Epsilons:
    def __init__(self, seen: list[float]) -> None:
        self._seen = seen

    def metrics(self, record):
        self._seen.append(record["epsilon"])

    def event(self, record):
        pass

    def close(self):
        pass
