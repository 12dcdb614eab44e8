"""The number of updates follows the environment steps of the run and nothing else."""

from __future__ import annotations

import pytest
from program_cases import short

import qfleet.api as api

STARTS, BATCH = 100, 16


@pytest.mark.parametrize(("envs", "actors", "unroll"), [(1, 1, 1), (8, 1, 1), (32, 1, 1), (4, 3, 1), (8, 1, 5)])
def test_trap_9_more_environments_do_not_change_updates_per_step(envs, actors, unroll, tmp_path):
    changes = {"actor.envs": envs, "actors": actors, "actor.unroll": unroll}
    run = api.train(short(env_steps=640, **changes), run_dir=tmp_path / "run")
    owed = (run.summary["env_steps"] - 200) / 4
    assert abs(run.summary["updates"] - owed) <= 1
    assert 640 <= run.summary["env_steps"] < 640 + envs * actors * unroll
    # Inline, weights are at most as old as the updates that one message of the actors pays for.
    assert run.summary["policy_lag_mean"] <= envs * actors * unroll / 4 + 1


@pytest.mark.parametrize(("ratio", "drawn"), [(0.5, 1), (4.0, 1), (32.0, 1), (4.0, 5)])
@pytest.mark.parametrize("placement", ["inline", "processes"])
def test_samples_per_insert_are_within_five_percent(placement, ratio, drawn, tmp_path):
    """Whether the learner or the actors are the slower side, with two actors that do not wait for each other."""
    steps = {0.5: 12_000, 4.0: 3000, 32.0: 1500}[ratio]
    changes = {
        "placement": placement,
        "actors": 2,
        "network.hidden": [16],
        "learner.batch_size": BATCH,
        "learner.train_period": BATCH / ratio,
        "learner.updates_per_draw": drawn,
        "learner.learning_starts": STARTS,
        "checkpoint.every": steps,
        "evaluation": {"every": steps, "episodes": 1, "envs": 1, "test_episodes": 1, "target": None},
    }
    summary = api.train(short(env_steps=steps, **changes), seed=1, run_dir=tmp_path / "run").summary
    due = ratio * (summary["env_steps"] - STARTS)
    assert summary["updates"] * BATCH == pytest.approx(due, rel=0.05)
    assert summary["samples_per_insert"] * summary["env_steps"] == pytest.approx(due, rel=0.05)
