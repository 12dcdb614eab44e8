"""What a resume may change of a run, and what it leaves as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from program_cases import short

import qfleet.api as api
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import ConfigError
from qfleet.operating import standing


def test_a_run_that_goes_on_beyond_its_target_does_so_again_after_a_death(tmp_path: Path) -> None:
    """Resumed without a word it ended at once, with its new budget in config.yaml."""
    reached = {"evaluation.target": -1000.0, "evaluation.in_a_row": 1}
    run = api.train(short(env_steps=1200, **reached), run_dir=tmp_path / "run")
    assert run.summary["stopped_by"] == "target"
    checkpoints = {path.name for path in (run.dir / "checkpoints").iterdir()}

    def die(metrics: dict[str, Any], stop: Any) -> None:
        raise RuntimeError("before its first checkpoint")

    with pytest.raises(RuntimeError, match="first checkpoint"):
        api.resume(run.dir, env_steps=1600, callbacks=Callbacks(on_step=die))
    assert {path.name for path in (run.dir / "checkpoints").iterdir() if path.name[0] != "."} <= checkpoints
    again = api.resume(run.dir)
    assert (again.summary["stopped_by"], again.summary["env_steps"]) == ("budget", 1600)


@pytest.mark.parametrize("changes", [{"learners": 500}, {"env_steps": 1}], ids=str)
def test_a_refused_resume_is_no_end_of_the_run(changes: dict[str, Any], tmp_path: Path) -> None:
    """Its state became `failed`, with the text of the refusal."""
    run = api.train(short(env_steps=300), run_dir=tmp_path / "run")
    before = standing(run.dir)
    with pytest.raises(ConfigError):
        api.resume(run.dir, **changes)
    assert standing(run.dir) == before
    assert before.state == "finished"


@pytest.mark.parametrize("changes", [{"placement": "inline"}, {"learners": 2}], ids=str)
def test_a_pipeline_in_processes_goes_on_elsewhere_although_it_could_be_fused_there(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    game = {"env": {"kind": "tensor", "game": "cartpole", "reward_scale": 0.005}, "placement": "processes"}
    run = api.train(short(env_steps=400, **game, **{"learner.learning_starts": 100}), run_dir=tmp_path / "run")
    assert run.summary["topology"] == "pipeline"
    moved = api.resume(run.dir, env_steps=600, **changes)
    assert moved.summary["topology"] == "pipeline"
    assert moved.summary["env_steps"] >= 600
