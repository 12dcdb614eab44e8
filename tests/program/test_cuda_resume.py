"""Exact resume on a GPU: with deterministic settings, a fused run that was cut ends with the bytes of an uncut one."""

from __future__ import annotations

import pytest
import torch
from program_cases import fingerprint, stop_at

import qfleet.api as api
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PIECE = 16_384
"""Environment steps of one piece of the rollout runs: 512 environments, 32 ticks."""
EVALUATION = {"episodes": 4, "test_episodes": 4, "max_episode_steps": 200, "target": None}


@pytest.fixture(autouse=True)
def _deterministic_only_here():
    """The setting is the whole process's; the tests after these run as ever."""
    cudnn, matrices = torch.backends.cudnn, torch.get_float32_matmul_precision()
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    yield
    torch.use_deterministic_algorithms(before[0])
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = before[1:]
    torch.set_float32_matmul_precision(matrices)


def rollouts() -> Experiment:
    """PQN on Breakout: convolutions, and a piece is one rollout; cut while it is eager or after it was recorded."""
    changes = {
        "env_steps": 12 * PIECE,
        "actor.envs": 512,
        "agent.rollout_length": 32,
        "agent.minibatches": 8,
        "checkpoint.every": 5 * PIECE,
    }
    return with_changes(preset("minatar:breakout"), {**changes, "evaluation": {**EVALUATION, "every": 6 * PIECE}})


def replays(algo: str) -> Experiment:
    """A replay agent on CartPole; its pieces are of about 256 updates."""
    changes = {
        "env_steps": 30_000,
        "learner.learning_starts": 1000,
        "learner.batch_size": 32,
        "learner.train_period": 8.0,
        "checkpoint.every": 11_000,
    }
    return with_changes(apply(preset("cartpole"), algo), {**changes, "evaluation": {**EVALUATION, "every": 14_000}})


EXPERIMENTS = {
    "minatar:breakout": (rollouts, (2 * PIECE, 9 * PIECE)),
    **{f"cartpole {algo}": (lambda algo=algo: replays(algo), (3000, 17_000)) for algo in ("dqn", "prioritised", "c51")},
}


@pytest.mark.parametrize("precision", ["auto", "fp16"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_trap_15_cut_and_resumed_on_cuda_equals_uncut(name, precision, tmp_path):
    make, cuts = EXPERIMENTS[name]
    experiment = with_changes(make(), {"device": "cuda", "accel.deterministic": True, "accel.precision": precision})
    uncut = api.train(experiment, seed=5, run_dir=tmp_path / "uncut")
    assert uncut.summary["topology"] == "fused"
    assert uncut.summary["accel"].startswith("cuda: ")
    assert "recorded" in uncut.summary["accel"]
    for cut in cuts:
        directory = tmp_path / f"cut at {cut}"
        first = api.train(experiment, seed=5, run_dir=directory, callbacks=stop_at(cut))
        assert first.summary["stopped_by"] == "callback"
        resumed = api.resume(directory)
        assert resumed.summary["updates"] == uncut.summary["updates"]
        assert fingerprint(resumed) == fingerprint(uncut)
