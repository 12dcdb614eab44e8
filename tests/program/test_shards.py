"""Several replay shards in whole runs: what each gets, the rate, exact resume, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from program_cases import fingerprint, short, stop_at

import qfleet.api as api
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment, with_changes
from qfleet.runtime.checkpoint import complete, read_state


def experiment(algo: str = "prioritised", **changes: Any) -> Experiment:
    two = {"env_steps": 800, "actors": 3, "actor.envs": 2, "replay.shards": 2, "network.hidden": [16]}
    return short(algo, **{**two, **changes})


@pytest.mark.parametrize(("placement", "algo"), [("inline", "dqn"), ("inline", "r2d2"), ("processes", "prioritised")])
def test_every_shard_serves_its_actors_and_the_run_keeps_its_rate(placement: str, algo: str, tmp_path: Path) -> None:
    run = experiment(algo, placement=placement, env_steps=1200, **{"track.every_s": 0.1})
    done = api.train(run, seed=1, run_dir=tmp_path / "run")
    checkpoint = complete(done.dir / "checkpoints")[-1]
    shards = [read_state(checkpoint, f"replay-{shard}")["replay"] for shard in range(2)]
    assert [sorted(shard["seen"]) for shard in shards] == [["actor-0", "actor-2"], ["actor-1"]]
    inserted = [shard["counts"]["inserted"] for shard in shards]
    assert sum(inserted) == done.summary["env_steps"]
    owed = (sum(inserted) - 200) / run.learner.train_period
    assert done.summary["updates"] == pytest.approx(owed, rel=0.05, abs=2)
    assert done.summary["samples_per_insert"] * sum(inserted) == pytest.approx(owed * run.learner.batch_size, rel=0.05)
    records = [json.loads(line) for line in (done.dir / "metrics.jsonl").read_text().splitlines()]
    if algo != "r2d2":  # every transition but the newest can be drawn
        assert max(inserted) < records[-1]["replay_size"] <= sum(inserted)
    assert {"replay.0.busy", "replay.1.busy"} <= set(records[-1])


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_workers_of_parameter_servers_take_from_all_shards(mode: str, tmp_path: Path) -> None:
    served = {"learners": 2, "parallel.update": {"kind": "server", "servers": 2, "mode": mode}}
    done = api.train(experiment(**served), seed=1, run_dir=tmp_path / "run")
    checkpoint = complete(done.dir / "checkpoints")[-1]
    known = [read_state(checkpoint, f"worker-{worker}")["feed"]["known"] for worker in range(2)]
    assert all(standing.mass > 0 for standings in known for standing in standings)
    owed = (done.summary["env_steps"] - 200) / 4
    assert done.summary["updates"] == pytest.approx(owed, rel=0.05, abs=3)


def test_strict_inline_equals_plain_inline_with_two_shards(tmp_path: Path) -> None:
    plain = api.train(experiment(), seed=2, run_dir=tmp_path / "plain")
    strict = api.train(experiment(), seed=2, run_dir=tmp_path / "strict", strict=True)
    assert fingerprint(plain) == fingerprint(strict)


def test_trap_15_cut_and_resumed_equals_uncut_with_two_shards(tmp_path: Path) -> None:
    uncut = api.train(experiment(), seed=5, run_dir=tmp_path / "uncut")
    api.train(experiment(), seed=5, run_dir=tmp_path / "cut", callbacks=stop_at(230))
    api.resume(tmp_path / "cut", callbacks=stop_at(601))
    resumed = api.resume(tmp_path / "cut")
    assert resumed.summary["resume_grade"] == "exact"
    assert fingerprint(resumed) == fingerprint(uncut)


def test_two_shards_in_processes_go_on_from_a_checkpoint_at_the_same_rate(tmp_path: Path) -> None:
    run = experiment(placement="processes", env_steps=1200)
    first = api.train(run, run_dir=tmp_path / "run", callbacks=stop_at(500))
    resumed = api.resume(first.dir)
    assert resumed.summary["env_steps"] >= 1200
    owed = (resumed.summary["env_steps"] - 200) / run.learner.train_period
    assert resumed.summary["updates"] == pytest.approx(owed, rel=0.05)
    told = read_state(complete(resumed.dir / "checkpoints")[-1], "learner-0")["feed"]["known"]
    assert all(standing.mass > 0 for standing in told)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actors": 2, "replay.shards": 3}, r"replay\.shards 3 exceeds actors 2: some would have no work"),
        (
            {"normalise_rewards": True},
            r"needs one replay shard, not 2 \(replay.shards\).* set --normalise_rewards False",
        ),
        ({"agent.kind": "rollout", "learner.evaluated": "online"}, r"replay\.shards 2 needs agent\.kind 'replay'"),
        ({"topology": "fused", "env": {"kind": "tensor", "game": "cartpole"}, "actors": 2}, "topology 'fused' has one"),
    ],
)
def test_what_several_shards_cannot_do_is_said_before_the_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_changes(experiment("dqn"), changes)


def test_the_capacity_of_the_run_is_shared_in_proportion_to_the_actors(tmp_path: Path) -> None:
    run = experiment("dqn", **{"replay.capacity": 600, "replay.segment": 10})
    done = api.train(run, run_dir=tmp_path / "run")
    checkpoint = complete(done.dir / "checkpoints")[-1]
    owners = [read_state(checkpoint, f"replay-{shard}")["replay"]["chains"]["owner"] for shard in range(2)]
    assert [10 * len(owner) for owner in owners] == [400, 200]
    with pytest.raises(ConfigError, match=r"of which a shard has 40, makes 4 segments .* to 75 or more"):
        api.train(with_changes(run, {"replay.capacity": 60, "learner.learning_starts": 50}), run_dir=tmp_path / "small")
