"""Whole runs whose learners take turns in one process: every plan ends, resumes exactly, and is what was asked for."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from program_cases import digest, fingerprint, short, stop_at
from torch import nn

import qfleet.api as api
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment, with_changes
from qfleet.runtime import checkpoint

SMALL: dict[str, Any] = {"placement": "inline", "network.hidden": [16], "evaluation.max_episode_steps": 50}
PLANS: dict[str, Any] = {
    "data 2": {"learners": 2, "replay.sampler": {"kind": "prioritised"}, "strict": True},
    "data 3": {"learners": 3, "learner.updates_per_draw": 2, "learner.batch_size": 33},
    "local 3": {"learners": 3, "parallel.update": {"kind": "local", "period": 7}},
    "int8": {"learners": 2, "parallel.compression": {"kind": "int8"}},
    "topk": {"learners": 2, "parallel.compression": {"kind": "topk"}},
}

SERVERS: dict[str, Any] = {"learners": 2, "parallel.update": {"kind": "server", "servers": 2}}


def trained(tmp_path, name: str, **changes: Any) -> api.Run:
    return api.train(short(env_steps=600, **{**SMALL, **changes}), run_dir=tmp_path / name, seed=3)


def said(run: api.Run, kind: str) -> list[str]:
    events = [json.loads(line) for line in (run.dir / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["event"] == "notice" and event["kind"] == kind]


def ranks_of(run: api.Run) -> list[dict[str, Any]]:
    last = checkpoint.complete(run.dir / "checkpoints")[-1]
    return checkpoint.read_state(last, "learner-0")["ranks"]


@pytest.mark.parametrize("plan", PLANS)
def test_trap_15_a_plan_inline_cut_and_resumed_equals_uncut(plan, tmp_path):
    whole = trained(tmp_path, "whole", **PLANS[plan])
    summary = whole.summary
    assert (summary["placement"], summary["topology"], summary["resume_grade"]) == ("inline", "pipeline", "exact")
    assert abs(summary["updates"] - (summary["env_steps"] - 200) / 4) <= 2
    experiment = short(env_steps=600, **{**SMALL, **PLANS[plan]})
    cut = api.train(experiment, run_dir=tmp_path / "cut", seed=3, callbacks=stop_at(410))
    assert cut.summary["stopped_by"] == "callback"
    assert fingerprint(api.resume(tmp_path / "cut")) == fingerprint(whole)
    weights = [rank["update"]["step"]["weights"] for rank in ranks_of(whole)]
    assert len(weights) == PLANS[plan]["learners"]
    if plan != "local 3":
        assert all((own == weights[0]).all() for own in weights)


def test_ranks_of_a_recurrent_agent_take_turns_too(tmp_path):
    run = api.train(short("r2d2", env_steps=500, placement="inline", learners=2), run_dir=tmp_path / "run", seed=3)
    first, second = (rank["update"]["step"] for rank in ranks_of(run))
    assert first["count"] == second["count"] == run.summary["updates"] > 5
    assert (first["weights"] == second["weights"]).all()


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_a_split_network_is_computed_whole_and_says_so(split, tmp_path):
    changes = {"network.hidden": [16, 16]}
    plain, whole = (
        trained(tmp_path, "plain", **changes),
        trained(tmp_path, split, **changes, **{f"parallel.{split}": 2}),
    )
    assert fingerprint(whole) == fingerprint(plain)
    (text,) = said(whole, "no_effect")
    assert "inline computes whole networks" in text
    assert not said(plain, "no_effect")


@pytest.mark.parametrize("pieces", [{"parallel.tensor": 2}, {"parallel.update": {"kind": "sharded"}}], ids=str)
def test_replicas_of_a_network_in_pieces_are_whole_ones(pieces, tmp_path):
    changes = {"learners": 2, "network.hidden": [16, 16]}
    plain, split = trained(tmp_path, "plain", **changes), trained(tmp_path, "split", **changes, **pieces)
    assert [digest(rank) for rank in ranks_of(split)] == [digest(rank) for rank in ranks_of(plain)]


def test_what_no_ranks_could_split_is_refused_inline_as_well(tmp_path):
    with pytest.raises(ConfigError, match="tensor 3 does not divide the 16 outputs"):
        trained(tmp_path, "run", **{"network.hidden": [16, 16], "parallel.tensor": 3})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"learners": 3}, {"learners": 2}),
        ({}, {"learners": 2}),
        (SERVERS, {"parallel.update.mode": "async"}),
        (SERVERS, {"parallel.update.kind": "allreduce"}),
    ],
)
def test_a_run_whose_settings_name_other_learners_goes_on_with_those(before, after, tmp_path):
    run = trained(tmp_path, "run", **before)
    config = run.dir / "config.yaml"
    config.write_text(with_changes(Experiment.from_yaml(config), {**after, "placement": "inline"}).to_yaml())
    further = api.resume(run.dir, env_steps=800)
    assert further.summary["updates"] > run.summary["updates"]
    assert further.summary["env_steps"] >= 800


class PartlyFrozen(nn.Module):
    """A torso whose first layer is not trained; its bias lies beside trained values in the flat vector."""

    out_features = 16

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.fixed = nn.Linear(4, 24).requires_grad_(False)
        self.fixed.bias.fill_(0.25)
        self.body = nn.Linear(24, 16)

    def forward(self, observation: Any) -> Any:
        return torch.relu(self.body(torch.tanh(self.fixed(observation))))


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"parallel.update": {"kind": "local"}},
        {"parallel.compression": {"kind": "sign"}},
        {"parallel.compression": {"kind": "sign"}, "parallel.update": {"kind": "server"}},
    ],
)
def test_parameters_that_are_not_trained_stay_as_they_are(plan, tmp_path):
    settings = {**SMALL, "network": {"kind": "custom"}, "learners": 2, **plan}
    del settings["network.hidden"]
    run = api.train(short(env_steps=400, **settings), run_dir=tmp_path / "run", seed=3, network=PartlyFrozen)
    assert run.summary["updates"] > 40
    kept = dict(api.load(run.dir, network=PartlyFrozen).network.named_parameters())
    (bias,) = [value for name, value in kept.items() if name.endswith("fixed.bias")]
    assert (bias == 0.25).all()


class SteepOnce(nn.Module):
    """A torso whose values are finite, but now and then, on the second rank alone, not one of its slopes."""

    out_features = 16

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 16)
        self.calls = 0

    def forward(self, observation: Any) -> Any:
        self.calls += 1
        features = self.second(torch.relu(self.first(observation)))
        if threading.current_thread().name == "rank 1" and torch.is_grad_enabled() and self.calls % 37 == 0:
            features = features + 0 * (self.second.bias * 0).abs().sqrt().sum()
        return features


@pytest.mark.parametrize("plan", [{}, {"parallel.compression": {"kind": "sign"}}])
def test_a_rank_whose_gradient_alone_is_not_finite_is_named(plan, tmp_path):
    settings = {**SMALL, "network": {"kind": "custom"}, "learners": 2, **plan}
    del settings["network.hidden"]
    run = api.train(short(env_steps=600, **settings), run_dir=tmp_path / "run", seed=3, network=SteepOnce)
    skipped = said(run, "skipped_update")
    assert skipped
    assert all(text.endswith("(learner 1)") for text in skipped)
