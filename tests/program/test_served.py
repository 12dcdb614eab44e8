"""Whole runs whose actors are served: the same in every placement, exact inline, and alive when a server dies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from program_cases import fingerprint, short, stop_at

import qfleet.api as api
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment
from qfleet.observe.sinks import read_jsonl

SLOW = pytest.mark.slow


def served(algo: str = "dqn", env_steps: int = 1200, **changes: Any) -> Experiment:
    return short(algo, env_steps=env_steps, **{"inference.kind": "served", "agent.n_step": 3, **changes})


@pytest.mark.parametrize("algo", ["dqn", pytest.param("r2d2", marks=SLOW)])
def test_inline_a_served_run_repeats_and_resumes_to_the_byte(algo, tmp_path):
    settings = {"actors": 2, "actor.envs": 4}
    whole = api.train(served(algo, **settings), seed=5, run_dir=tmp_path / "whole")
    strict = api.train(served(algo, **settings), seed=5, run_dir=tmp_path / "strict", strict=True)
    api.train(served(algo, **settings), seed=5, run_dir=tmp_path / "cut", callbacks=stop_at(711))
    assert fingerprint(whole) == fingerprint(strict) == fingerprint(api.resume(tmp_path / "cut"))


@pytest.mark.parametrize(
    ("placement", "changes"),
    [
        ("inline", {}),
        ("processes", {"actors": 2, "actor.groups": 2}),
        pytest.param("processes", {"actors": 3, "actor.envs": 3, "inference.servers": 2}, marks=SLOW),
    ],
)
def test_served_actors_learn_in_every_placement(placement, changes, tmp_path):
    experiment = served(env_steps=3000, placement=placement, **changes)
    run = api.train(experiment, seed=1, run_dir=tmp_path / "run")
    assert 3000 <= run.summary["env_steps"] < 3200
    owed = (run.summary["env_steps"] - 200) / experiment.learner.train_period
    assert abs(run.summary["updates"] - owed) <= 8
    assert run.summary["eval"]["mean"] > 40  # a random policy balances for about 22 steps
    assert run.summary["policy_lag_mean"] > 0
    started = next(event for event in read_jsonl(run.dir / "events.jsonl") if event["event"] == "started")
    said = {"inline": "", "processes": "served: "}[placement]
    assert started.get("inference", "")[: len("served: ")] == said


@pytest.mark.parametrize("point", ["worker.step:kill@40", pytest.param("channel.after_send:kill@30", marks=SLOW)])
def test_a_run_goes_on_when_its_inference_server_dies(point, tmp_path, monkeypatch):
    monkeypatch.setenv("QFLEET_FAIL", f"inference-0/{point}")
    experiment = served(env_steps=2000, placement="processes", actors=2, **{"inference.resend_s": 0.5})
    run = api.train(experiment, run_dir=tmp_path / "run")
    assert 2000 <= run.summary["env_steps"] < 2200
    restarts = [event for event in read_jsonl(run.dir / "events.jsonl") if event["event"] == "restart"]
    assert [event["role"] for event in restarts] == ["inference"]


@pytest.mark.parametrize(
    ("algo", "changes", "words"),
    [
        ("pqn", {}, "needs agent.kind 'replay'"),
        ("dqn", {"inference.servers": 2}, "exceeds actors 1"),
        (
            "dqn",
            {"topology": "fused", "env.kind": "tensor", "env.game": "cartpole"},
            "inference.kind 'served' is for a pipeline",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(algo, changes, words):
    with pytest.raises(ConfigError, match=words):
        short(algo, **{"inference.kind": "served", **changes})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_servers_and_the_evaluator_compute_on_gpus_that_no_learner_has(tmp_path):
    settings = {"placement": "processes", "device": "cuda", "inference.device": "cuda", "inference.servers": 2}
    run = api.train(served(env_steps=3000, actors=2, **settings), seed=3, run_dir=tmp_path / "run")
    assert run.summary["env_steps"] >= 3000
    assert run.summary["updates"] > 0
