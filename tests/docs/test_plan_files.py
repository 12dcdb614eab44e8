"""The plans of `examples/plans`: each is on the page of several learners, can be followed, and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfleet import api
from qfleet.control.plan import Plan
from qfleet.experiment import with_changes
from qfleet.presets import algorithms, preset

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "plans").glob("*.yaml"))
SHORT = {
    "env_steps": 3000,
    "evaluation.every": 3000,
    "evaluation.episodes": 2,
    "evaluation.envs": 2,
    "evaluation.test_episodes": 2,
    "evaluation.max_episode_steps": 100,
}


def test_the_page_names_all_of_them() -> None:
    page = (ROOT / "docs" / "parallel.md").read_text()
    named = {word for line in page.splitlines() for word in line.split() if word.startswith("examples/plans/")}
    assert named == {str(file.relative_to(ROOT)) for file in FILES}
    assert len(FILES) == 14


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_settings_fit_the_game(file: Path) -> None:
    plan = Plan.from_yaml(file)
    experiment = algorithms.apply(preset(plan.preset), plan.algo)
    changed = with_changes(experiment, {"placement": plan.placement, **plan.settings})
    assert not changed.fused
    assert changed.ranks > 1


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_runs_to_its_end(file: Path, tmp_path: Path) -> None:
    experiment = algorithms.apply(preset("minatar:breakout"), "dqn")
    run = api.train(experiment, plan=file, run_dir=tmp_path / "run", seed=1, **SHORT)
    assert run.summary["env_steps"] >= 3000
    assert run.summary["updates"] > 100
