"""The number of updates follows the environment steps of the run and nothing else."""

from __future__ import annotations

import pytest
from program_cases import short

import qfleet.api as api


@pytest.mark.parametrize(("envs", "actors", "unroll"), [(1, 1, 1), (8, 1, 1), (32, 1, 1), (4, 3, 1), (8, 1, 5)])
def test_trap_9_more_environments_do_not_change_updates_per_step(envs, actors, unroll, tmp_path):
    changes = {"actor.envs": envs, "actors": actors, "actor.unroll": unroll}
    run = api.train(short(env_steps=640, **changes), run_dir=tmp_path / "run")
    owed = (run.summary["env_steps"] - 200) / 4
    assert abs(run.summary["updates"] - owed) <= 1
    assert 640 <= run.summary["env_steps"] < 640 + envs * actors * unroll
    # Inline, weights are at most as old as the updates that one message of the actors pays for.
    assert run.summary["policy_lag_mean"] <= envs * actors * unroll / 4 + 1
