"""The thin slice: DQN on CartPole through the same roles and the same map in every placement."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from program_cases import fingerprint, short

import qfleet.api as api
from qfleet import program
from qfleet.runtime.inline import InlinePlacement
from qfleet.runtime.processes import ProcessPlacement

LEARNERS = {"inline": 1, "processes": 1, "two-rank": 2, "spawned": 1, "ray": 1}


@pytest.mark.parametrize("form", list(LEARNERS))
def test_dqn_learns_through_the_map(form, tmp_path, monkeypatch, request):
    """Every step is taken, every update is made, the rate is kept, and the result plays better than chance."""
    if form == "ray":
        request.getfixturevalue("ray_session")
    placement = {"two-rank": "processes", "spawned": "processes"}.get(form, form)
    if form == "spawned":
        # Two roles in freshly spawned processes, as CUDA roles will be.
        monkeypatch.setattr(program, "SPAWNED", ("actor", "learner"))
    experiment = short(env_steps=3000, placement=placement, learners=LEARNERS[form], **{"agent.n_step": 3})
    run = api.train(experiment, seed=1, run_dir=tmp_path / "run")
    summary = run.summary
    assert summary["env_steps"] == 3008 or placement != "inline"
    assert 3000 <= summary["env_steps"] < 3000 + 200
    owed = (summary["env_steps"] - 200) / experiment.learner.train_period
    assert abs(summary["updates"] - owed) <= 8
    assert summary["eval"]["mean"] > 40  # a random policy balances for about 22 steps
    assert (run.dir / "model" / "model.safetensors").is_file()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("algo", ["rainbow", "r2d2"])
def test_strict_inline_equals_plain_inline(algo, tmp_path):
    """No role relies on sharing memory with another: sending every message through the serialiser changes no bit."""
    plain = api.train(short(algo), seed=2, run_dir=tmp_path / "plain")
    strict = api.train(short(algo), seed=2, run_dir=tmp_path / "strict", strict=True)
    assert fingerprint(plain) == fingerprint(strict)


def test_placements_offer_the_same_interface():
    for placement in (InlinePlacement, ProcessPlacement):
        for name in ("open", "done", "advance", "reports", "pause", "save", "restore", "close"):
            assert hasattr(placement, name)


def test_an_error_in_a_role_is_one_error_and_leaves_no_lock(tmp_path: Path):
    """The run directory can be used again after a failure, and says where the run failed."""
    with pytest.raises(Exception, match="no_such_kwarg"):
        api.train(short(**{"env.kwargs": {"no_such_kwarg": 1}}), run_dir=tmp_path / "run")
    run = api.train(short(env_steps=600), run_dir=tmp_path / "other")
    assert run.summary["env_steps"] >= 600
