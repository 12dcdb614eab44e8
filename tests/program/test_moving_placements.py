"""A run that was cut in one placement goes on in another: in lock-step to the byte as if it had never been cut."""

from __future__ import annotations

from typing import Any

import pytest
from program_cases import short, states, stop_at

import qfleet.api as api
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment
from qfleet.presets import preset

SLOW = pytest.mark.slow


def tiny(algo: str, placement: str) -> Experiment:
    """Return a run of two actors in lock-step, with messages under way whenever it is cut."""
    small: dict[str, Any] = {
        "env_steps": 240,
        "actors": 2,
        "actor.envs": 4,
        "learner.learning_starts": 100,
        "learner.batch_size": 8,
        "learner.train_period": 24.0 if algo == "r2d2" else 8.0,
        "network.hidden": [16],
        "evaluation.every": 100,
        "evaluation.max_episode_steps": 40,
        "topology": "pipeline",
        "lockstep": True,
    }
    return short(algo, "cartpole", **small, placement=placement)


@pytest.mark.parametrize(
    ("algo", "first", "second"),
    [
        ("prioritised", "inline", "processes"),
        ("prioritised", "processes", "inline"),
        pytest.param("r2d2", "inline", "processes", marks=SLOW),
        pytest.param("r2d2", "processes", "inline", marks=SLOW),
    ],
)
def test_a_run_goes_on_in_another_placement_as_if_never_cut(algo, first, second, tmp_path):
    uncut = api.train(tiny(algo, "inline"), seed=5, run_dir=tmp_path / "uncut")
    api.train(tiny(algo, first), seed=5, run_dir=tmp_path / "cut", callbacks=stop_at(167))
    moved = api.resume(tmp_path / "cut", placement=second)
    assert moved.summary["resume_grade"] == "exact"
    assert states(moved) == states(uncut)
    assert Experiment.from_yaml(tmp_path / "cut" / "config.yaml").placement == second


@pytest.mark.slow
def test_a_run_goes_from_processes_to_ray_and_inline_as_if_never_cut(tmp_path, ray_session):
    uncut = api.train(tiny("dqn", "inline"), seed=5, run_dir=tmp_path / "uncut")
    api.train(tiny("dqn", "processes"), seed=5, run_dir=tmp_path / "cut", callbacks=stop_at(110))
    api.resume(tmp_path / "cut", placement="ray", callbacks=stop_at(180))
    assert states(api.resume(tmp_path / "cut", placement="inline")) == states(uncut)


def test_a_fused_loop_is_not_taken_apart(tmp_path):
    loop = short("dqn", "cartpole", 400, topology="auto", env=preset("cartpole").env)
    run = api.train(loop, seed=5, run_dir=tmp_path / "run")
    before = (run.dir / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match="is one fused loop, which placement 'processes' would arrange anew"):
        api.resume(run.dir, placement="processes")
    assert (run.dir / "config.yaml").read_bytes() == before
    assert api.resume(run.dir).summary["env_steps"] >= 400


def test_an_unknown_placement_is_refused_and_changes_nothing(tmp_path):
    run = api.train(tiny("dqn", "inline"), seed=5, run_dir=tmp_path / "run", callbacks=stop_at(110))
    before = (run.dir / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match="placement"):
        api.resume(run.dir, placement="cloud")
    assert (run.dir / "config.yaml").read_bytes() == before
