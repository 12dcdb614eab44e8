"""Agents with memory in processes of their own: every step, every update and every priority arrives."""

from __future__ import annotations

import numpy as np
import pytest
from program_cases import short

import qfleet.api as api
from qfleet.runtime import checkpoint


@pytest.mark.parametrize(("learners", "initial"), [(1, "maximum"), (2, "maximum"), (1, "actor")])
def test_sequences_and_their_priorities_travel_between_processes(learners, initial, tmp_path):
    few = {"actor.envs": 4, "replay.sampler.initial": initial}
    experiment = short("r2d2", placement="processes", learners=learners, actors=2, **few)
    run = api.train(experiment, seed=1, run_dir=tmp_path / "run")
    steps = run.summary["env_steps"]
    assert 1200 <= steps < 1400
    assert abs(run.summary["updates"] - (steps - 200) / experiment.learner.train_period) <= 8
    saved = checkpoint.newest_good(run.dir / "checkpoints")
    stored = checkpoint.read_state(saved.directory, "replay-0")["replay"]["sampler"]
    # Starts lie four steps apart, and one more piece begins in some episodes: fewer items than rows.
    assert 1200 / 8 < len(stored["values"]) < 1200 / 3
    different = len(np.unique(stored["values"]))
    assert different > 20  # what was drawn has come back with a priority of its own
    if initial == "actor":
        assert different > 0.9 * len(stored["values"]), "what was not drawn has one, too"
