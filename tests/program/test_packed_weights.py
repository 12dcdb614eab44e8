"""Runs whose actors follow packed weights: they end, count their bytes, are exact, and survive the sender's death."""

from __future__ import annotations

import json
from typing import Any

import pytest
from program_cases import fingerprint, short, states, stop_at

import qfleet.api as api

SMALL: dict[str, Any] = {"env_steps": 800, "network.hidden": [64, 64], "learner.publish_period": 4}
DELTA: dict[str, Any] = {"learner.weights": {"kind": "delta", "keyframe_period": 5}}


def last_record(run: api.Run) -> dict[str, Any]:
    return json.loads((run.dir / "metrics.jsonl").read_text().splitlines()[-1])


def test_every_form_runs_inline_and_takes_the_bytes_it_should(tmp_path):
    sizes = {}
    for kind in ("none", "bf16", "int8", "delta"):
        run = api.train(short(**SMALL, strict=True), run_dir=tmp_path / kind, **{"learner.weights": {"kind": kind}})
        sizes[kind] = last_record(run)["weight_bytes"]
        assert abs(run.summary["updates"] - 150) <= 2
    assert sizes["bf16"] == sizes["none"] / 2
    assert sizes["int8"] < sizes["none"] / 3.8
    assert sizes["delta"] < sizes["none"] / 14


@pytest.mark.parametrize("cut", [223, 501])
def test_a_run_by_deltas_cut_and_resumed_equals_one_never_cut(cut, tmp_path):
    uncut = api.train(short(**SMALL, **DELTA), seed=5, run_dir=tmp_path / "uncut")
    api.train(short(**SMALL, **DELTA), seed=5, run_dir=tmp_path / "cut", callbacks=stop_at(cut))
    assert fingerprint(api.resume(tmp_path / "cut")) == fingerprint(uncut)


def test_processes_in_lockstep_have_inlines_states(tmp_path):
    settings = {**SMALL, **DELTA, "env_steps": 400, "actors": 2, "actor.envs": 4}
    inline = api.train(short(**settings), seed=5, run_dir=tmp_path / "inline")
    lockstep = api.train(
        short(**settings, placement="processes", lockstep=True), seed=5, run_dir=tmp_path / "processes"
    )
    assert states(lockstep) == states(inline)


def test_actors_and_inference_servers_follow_a_learner_that_dies(tmp_path, monkeypatch):
    monkeypatch.setenv("QFLEET_FAIL", "learner-0/worker.step:kill@120")
    served = {"placement": "processes", "actors": 2, "actor.envs": 4, "inference": {"kind": "served"}}
    run = api.train(short(**{**SMALL, **DELTA, **served, "env_steps": 2000}), run_dir=tmp_path / "run")
    events = [json.loads(line) for line in (run.dir / "events.jsonl").read_text().splitlines()]
    assert [event["role"] for event in events if event["event"] == "restart"] == ["learner"]
    assert run.summary["env_steps"] >= 2000


def test_the_first_worker_of_parameter_servers_publishes_deltas(tmp_path):
    servers = {"learners": 2, "placement": "inline", "parallel.update": {"kind": "server", "servers": 2}}
    run = api.train(short(**SMALL, **DELTA, **servers), run_dir=tmp_path / "run")
    plain = api.train(short(**SMALL, **servers), run_dir=tmp_path / "plain")
    assert last_record(run)["weight_bytes"] < last_record(plain)["weight_bytes"] / 8
    assert run.summary["updates"] == plain.summary["updates"]


def test_rollouts_by_several_actors_wait_for_deltas_without_a_standstill(tmp_path):
    several = {"actors": 2, "actor.envs": 4, "placement": "processes", "env_steps": 2000, "agent.rollout_length": 8}
    run = api.train(short("pqn", "catch", **several, **DELTA), run_dir=tmp_path / "run")
    assert run.summary["env_steps"] >= 2000
