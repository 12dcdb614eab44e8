"""Runs whose updates several learners share, in real processes: every way of sharing finishes, learns and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from program_cases import short

import qfleet.api as api
from qfleet.core.errors import ConfigError

SMALL: dict[str, Any] = {
    "placement": "processes",
    "network.hidden": [32, 32],
    "learner.batch_size": 32,
    "learner.publish_period": 8,
    "evaluation.target": None,
    "agent.double": True,
}
SLOW = pytest.mark.slow
PLANS: dict[str, Any] = {
    "data 2": {"learners": 2},
    "tensor 2": {"parallel.tensor": 2},
    "pipeline 2": {"parallel.pipeline": 2, "parallel.schedule": "gpipe"},
    "sharded": {"learners": 2, "parallel.update": {"kind": "sharded"}},
    "local": {"learners": 2, "parallel.update": {"kind": "local", "period": 4}},
    "topk": {"learners": 2, "parallel.compression": {"kind": "topk"}},
    "2 x 2": {"parallel.pipeline": 2, "parallel.tensor": 2},
    "data 2 x tensor 2": {"learners": 2, "parallel.tensor": 2},
    "sharded x tensor 2": {"learners": 2, "parallel.tensor": 2, "parallel.update": {"kind": "sharded"}},
    "data 2 x pipeline 2": {"learners": 2, "parallel.pipeline": 2},
    "tensor 2, 2 shards": {"parallel.tensor": 2, "actors": 2, "replay.shards": 2},
    "data 3, 2 shards": {"learners": 3, "actors": 2, "replay.shards": 2},
    **{
        kind: {"learners": 2, "parallel.compression": {"kind": kind}}
        for kind in ("fp16", "bf16", "int8", "sign", "powersgd")
    },
}
ORDINARY = ("tensor 2", "pipeline 2", "sharded", "local", "topk")
"""Two data-parallel ranks are among the ordinary tests by a run that is resumed."""


def last_record(run: api.Run) -> dict[str, Any]:
    return json.loads((run.dir / "metrics.jsonl").read_text().splitlines()[-1])


def among(ordinary: tuple[str, ...]) -> list[Any]:
    return [name if name in ordinary else pytest.param(name, marks=SLOW) for name in PLANS]


def trained(plan: str, folder: Path) -> api.Run:
    settings = {**SMALL, **PLANS[plan], "replay.sampler": {"kind": "prioritised"}}
    return api.train(short(env_steps=900, **settings), run_dir=folder, seed=3)


@pytest.mark.parametrize("plan", among(ORDINARY))
def test_every_plan_finishes_with_its_updates(plan, tmp_path):
    run = trained(plan, tmp_path / "run")
    assert abs(run.summary["updates"] - (run.summary["env_steps"] - 200) / 4) <= 1
    assert last_record(run)["skipped_updates"] == 0
    assert not list(run.dir.glob(".rendezvous*")), "what ranks met by is gone"
    assert api.load(run.dir).act([[0.0, 0.0, 0.0, 0.0]]).shape == (1,), "and a whole model is left"


@pytest.mark.slow
def test_ranks_that_share_layers_do_not_abort(tmp_path):
    """As they did after some 500 to 5,000 updates, when groups of a mesh had two threads (`parallel/gloo.py`)."""
    settings = {**SMALL, **PLANS["tensor 2"], "learner.train_period": 1.0, "evaluation.every": 10**6}
    run = api.train(short(env_steps=8000, **settings), run_dir=tmp_path / "run", seed=3)
    events = [json.loads(line) for line in (run.dir / "events.jsonl").read_text().splitlines()]
    assert not [event["cause"] for event in events if event["event"] == "restart"]


@pytest.mark.parametrize("plan", among(("data 2",)))
def test_every_plan_resumes(plan, tmp_path):
    run = trained(plan, tmp_path / "run")
    further = api.resume(run.dir, env_steps=1200)
    assert abs(further.summary["updates"] - (further.summary["env_steps"] - 200) / 4) <= 3
    assert last_record(further)["skipped_updates"] == 0
    assert not list(run.dir.glob(".rendezvous*"))


def test_a_split_run_leaves_a_whole_model(tmp_path):
    """By a plan that a person wrote: no more than what it is for and what it decides."""
    written = tmp_path / "plan.yaml"
    written.write_text("preset: cartpole\nalgo: dqn\nplacement: processes\nsettings: {actors: 1, parallel.tensor: 2}\n")
    changes = {name: value for name, value in SMALL.items() if name != "placement"}
    run = api.train(short(env_steps=600, **changes), run_dir=tmp_path / "run", seed=3, plan=written)
    assert run.summary["plan"]["settings"]["parallel.tensor"] == 2
    assert run.summary["updates"] > 50
    policy = api.load(run.dir)
    assert policy.act([[0.0, 0.0, 0.0, 0.0]]).shape == (1,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.tensor": 3}, r"32.*tensor|tensor.*32|does not divide"),
        ({"parallel.pipeline": 2, "learner.batch_size": 30}, r"learner\.batch_size 30"),
        ({"parallel.update": {"kind": "local"}}, r"needs learners 2 or more"),
        ({"parallel.compression": {"kind": "int8"}}, r"needs learners 2 or more"),
        ({"parallel.tensor": 2, "learners": 2, "parallel.compression": {"kind": "int8"}}, r"is for whole networks"),
        ({"parallel.after_death": "fewer"}, r"'fewer' is for learners 2 or more"),
        ({"parallel.after_death": "fewer", "learners": 2, "parallel.tensor": 2}, r"'fewer' is .* whole networks"),
        (
            {"parallel.after_death": "fewer", "learners": 2, "learner.updates_per_draw": 2},
            r"updates_per_draw 2 needs equal parts",
        ),
        ({"parallel.update": {"kind": "sharded"}}, r"needs learners 2 or more"),
        (
            {"learners": 2, "parallel.update": {"kind": "sharded"}, "parallel.compression": {"kind": "int8"}},
            r"is for whole networks, not with parallel\.update\.kind 'sharded'",
        ),
        (
            {"learners": 2, "parallel.update": {"kind": "sharded"}, "parallel.pipeline": 2},
            r"'sharded' needs parallel\.pipeline 1",
        ),
        ({"parallel.tensor": 2, "learners": 2, "parallel.update": {"kind": "local"}}, r"'local' is for whole networks"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(changes, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        api.train(short(env_steps=600, **{**SMALL, **changes}), run_dir=tmp_path / "run")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "changes",
    [{}, {"parallel.compression": {"kind": "int8"}}, {"parallel.update": {"kind": "local"}}],
    ids=["sums", "int8", "local"],
)
def test_two_ranks_have_a_gpu_each_and_sum_by_nccl(changes, tmp_path):
    experiment = short(env_steps=900, **{**SMALL, "learners": 2, "device": "cuda", **changes})
    run = api.train(experiment, run_dir=tmp_path / "run", seed=3)
    assert abs(run.summary["updates"] - (run.summary["env_steps"] - 200) / 4) <= 1
    assert "2 ranks that sum by NCCL" in run.summary["accel"]
