"""Whole runs through the API: what stops them, what they leave behind, and what can be made of that."""

from __future__ import annotations

import json
import shutil
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from program_cases import short, stop_at

import qfleet
from qfleet import Callbacks
from qfleet.core.errors import CheckpointError, ConfigError, EnvironmentFault, QfleetError
from qfleet.experiment import Experiment
from qfleet.observe.sinks import read_jsonl
from qfleet.runtime import checkpoint


def events(run: qfleet.Run, name: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run.dir / "events.jsonl") if event["event"] == name]


def test_a_run_leaves_what_the_design_promises(tmp_path):
    run = qfleet.train(short(), seed=3, run_dir=tmp_path / "run")
    files = {"config.yaml", "metrics.jsonl", "events.jsonl", "checkpoints", "model", "summary.json"}
    assert files <= {path.name for path in run.dir.iterdir()}
    promised = (
        "preset algo seed topology placement device env_steps updates wall_s env_steps_per_s updates_per_s eval target"
        " solved wall_s_to_target env_steps_to_target samples_per_insert policy_lag_mean resume_grade plan versions git"
        " hardware"
    )
    assert set(promised.split()) <= set(run.summary)
    assert json.loads((run.dir / "summary.json").read_text()) == run.summary
    assert set(run.summary["eval"]) >= {"mean", "ci95", "episodes"}
    assert Experiment.from_yaml(run.dir / "config.yaml") == short(seed=3)


def test_the_kept_model_acts_on_gymnasiums_own_environment(tmp_path):
    run = qfleet.train(short(env_steps=4000, **{"agent.n_step": 3}), seed=1, run_dir=tmp_path / "run")
    policy = qfleet.load(run.dir)
    env = gymnasium.make("CartPole-v1")
    lengths = []
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        done, length = False, 0
        while not done:
            observation, _, terminated, truncated, _ = env.step(policy.act(observation))
            done, length = terminated or truncated, length + 1
        lengths.append(length)
    assert np.mean(lengths) > 40
    assert np.array_equal(qfleet.load(run.dir / "model").q(observation), policy.q(observation))


def test_a_target_stops_the_run_only_when_reached_in_a_row(tmp_path):
    easy = {"evaluation.target": 1.0, "evaluation.in_a_row": 3, "evaluation.every": 100}
    run = qfleet.train(short(env_steps=5000, **easy), run_dir=tmp_path / "run")
    assert run.summary["stopped_by"] == "target"
    assert run.summary["solved"] is True
    assert len(events(run, "evaluation")) == 3
    assert run.summary["env_steps_to_target"] == events(run, "evaluation")[-1]["env_steps"]
    assert 0 < run.summary["wall_s_to_target"] <= run.summary["wall_s"]


def test_a_solved_run_is_over_until_it_gets_a_new_budget(tmp_path):
    easy = {"evaluation.target": 1.0, "evaluation.in_a_row": 1, "evaluation.every": 300}
    run = qfleet.train(short(env_steps=5000, **easy), run_dir=tmp_path / "run")
    again = qfleet.resume(run.dir)
    assert again.summary["env_steps"] == run.summary["env_steps"]
    assert again.summary["stopped_by"] == "target"
    assert again.summary["eval"] == run.summary["eval"]
    longer = qfleet.resume(run.dir, env_steps=900)
    assert longer.summary["env_steps"] >= 900


def test_no_step_is_evaluated_twice(tmp_path):
    run = qfleet.train(short(env_steps=1200, **{"evaluation.every": 400}), run_dir=tmp_path / "run")
    steps = [event["env_steps"] for event in events(run, "evaluation")]
    assert steps == [400, 800, 1200]


def test_patience_stops_a_run_that_gets_no_better(tmp_path):
    hopeless = {"evaluation.patience": 2, "evaluation.every": 100, "optim.lr": 1e-12, "learner.evaluated": "online"}
    run = qfleet.train(short(env_steps=5000, **hopeless), run_dir=tmp_path / "run")
    assert run.summary["stopped_by"] == "patience"
    assert run.summary["env_steps"] < 1000


@pytest.mark.usefixtures("written_at_once")
@pytest.mark.parametrize("name", ["on_evaluation", "on_checkpoint"])
def test_callbacks_are_given_metrics_and_can_stop_the_run(name, tmp_path):
    seen: list[dict[str, Any]] = []

    def callback(metrics, stop):
        seen.append(metrics)
        stop()

    run = qfleet.train(short(env_steps=3000), run_dir=tmp_path / "run", callbacks=Callbacks(**{name: callback}))
    assert run.summary["stopped_by"] == "callback"
    assert run.summary["env_steps"] < 1000
    assert seen[0]["env_steps"] >= 400


def test_the_best_model_is_kept_and_not_the_last(tmp_path):
    run = qfleet.train(short(env_steps=3000, **{"evaluation.every": 250}), run_dir=tmp_path / "run")
    evaluations = events(run, "evaluation")
    best = max(evaluations, key=lambda event: (event["mean"], event["env_steps"]))
    description = json.loads((run.dir / "model" / "model.json").read_text())
    assert description["extra"]["env_steps"] == best["env_steps"]
    assert run.summary["best_validation"] == best["mean"]


def test_test_seeds_are_not_used_before_the_summary(tmp_path, monkeypatch):
    from qfleet.core import seeding

    asked: list[str] = []
    real = seeding.episode_seeds

    def recording(seed, split, count, first=0):
        asked.append(split)
        return real(seed, split, count, first)

    monkeypatch.setattr(seeding, "episode_seeds", recording)
    qfleet.train(short(), run_dir=tmp_path / "run")
    assert asked[-1] == "test"
    assert "test" not in asked[:-1]
    assert {"training", "validation"} <= set(asked)


def test_a_warm_start_begins_where_the_other_model_ended(tmp_path):
    first = qfleet.train(short(), seed=1, run_dir=tmp_path / "first")
    # Nothing is learned here, so that what is kept is what was loaded.
    still = {"optim.lr": 1e-30, "warm_start": str(first.dir / "model"), "learner.evaluated": "online"}
    second = qfleet.train(short(env_steps=600, **still), seed=2, run_dir=tmp_path / "second")
    observation = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    assert np.allclose(qfleet.load(first.dir).q(observation), qfleet.load(second.dir).q(observation), atol=1e-6)
    assert "6 of 6 tensors" in events(second, "notice")[0]["text"]


def test_a_warm_started_run_resumes_without_the_other_model(tmp_path):
    first = qfleet.train(short(), seed=1, run_dir=tmp_path / "first")
    start = {"warm_start": str(first.dir / "model")}
    second = qfleet.train(short(**start), seed=2, run_dir=tmp_path / "second", callbacks=stop_at(600))
    shutil.rmtree(first.dir)
    assert qfleet.resume(second.dir).summary["env_steps"] >= 1200


def test_the_model_says_what_its_values_were_divided_by(tmp_path):
    run = qfleet.train(short(normalise_rewards=True, **{"env.reward_scale": 0.5}), run_dir=tmp_path / "run")
    scale = json.loads((run.dir / "model" / "model.json").read_text())["extra"]["reward_scale"]
    # Rewards of 1 are halved, then divided by the running deviation of their discounted sum, which is above 1.
    assert 0 < scale < 0.5


def test_a_warm_start_from_nothing_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(QfleetError, match=r"nowhere.*model"):
        qfleet.train(short(warm_start=str(tmp_path / "nowhere")), run_dir=tmp_path / "run")


class NanAfter(gymnasium.Env):
    """CartPole-like shapes; the reward becomes NaN after some steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.low * 0, {}

    def step(self, action):
        self.steps += 1
        return self.observation_space.low * 0, np.nan if self.steps > 30 else 1.0, False, self.steps >= 100, {}


def test_a_nan_reward_is_one_error_that_names_the_environment(tmp_path):
    with pytest.raises(EnvironmentFault, match="reward"):
        qfleet.train(env=NanAfter, run_dir=tmp_path / "run", env_steps=20_000)


def test_a_loss_that_stays_nan_ends_the_run_with_its_last_checkpoint(tmp_path, monkeypatch):
    from qfleet.algo import gradients

    real, calls = gradients.compute_loss, []

    def breaking(agent, online, target, batch):
        calls.append(1)
        loss = real(agent, online, target, batch)
        if len(calls) < 150:
            return loss
        return type(loss)(loss.per_sample * torch.nan, loss.priority, loss.metrics)

    monkeypatch.setattr(gradients, "compute_loss", breaking)
    with pytest.raises(QfleetError, match="3 updates in a row were not finite"):
        # Hand-written networks have a loss of their own.
        qfleet.train(short(env_steps=3000, **{"accel.kernels": "off"}), run_dir=tmp_path / "run")
    monkeypatch.undo()
    assert len(read_jsonl(tmp_path / "run" / "events.jsonl")) >= 3
    resumed = qfleet.resume(tmp_path / "run")
    assert resumed.summary["env_steps"] >= 3000


class Doubled(torch.nn.Module):
    """A user's own torso."""

    def __init__(self, spec):
        super().__init__()
        self.layer = torch.nn.Linear(4, 16)

    def forward(self, observation):
        return torch.tanh(self.layer(observation * 2))


def test_a_users_own_network_is_trained_saved_and_asked_for_at_load(tmp_path):
    settings = {"evaluation": {"episodes": 2, "test_episodes": 2}, "learner": {"learning_starts": 200}}
    run = qfleet.train(env="CartPole-v1", network=Doubled, run_dir=tmp_path / "run", env_steps=1200, **settings)
    policy = qfleet.load(run.dir, network=Doubled)
    assert policy.act(np.zeros((5, 4), np.float32)).shape == (5,)
    with pytest.raises(ConfigError, match="Doubled"):
        qfleet.load(run.dir)


def test_a_run_directory_in_use_is_refused(tmp_path):
    refused: list[str] = []

    def on_step(metrics, stop):
        with pytest.raises(ConfigError, match="in use") as error:
            qfleet.resume(tmp_path / "run")
        refused.append(str(error.value))
        stop()

    qfleet.train(short(), run_dir=tmp_path / "run", callbacks=Callbacks(on_step=on_step))
    assert len(refused) == 1


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path):
    run = qfleet.train(short(env_steps=600), run_dir=tmp_path / "run", callbacks=stop_at(300))
    before = (run.dir / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="already holds a run"):
        qfleet.train(short(), run_dir=run.dir)
    assert (run.dir / "config.yaml").read_text() == before


@pytest.mark.parametrize("name", ["", " ", "a\0b", 3, "x" * 300])
def test_what_cannot_be_a_directory_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        qfleet.train(short(), run_dir=name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"episodes": 0}, {"episodes": 2.5}, {"seed": -1}, {"seed": "x"}])
def test_evaluations_of_nothing_are_refused(wrong, tmp_path):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        qfleet.evaluate(tmp_path, **wrong)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path):
    run = qfleet.train(short(), run_dir=tmp_path / "run")
    older, newest = checkpoint.complete(run.dir / "checkpoints")[-2:]
    victim = newest / "replay-0.safetensors"
    victim.write_bytes(victim.read_bytes()[:-7])
    resumed = qfleet.resume(run.dir, env_steps=1400)
    event = events(resumed, "resumed")[0]
    assert event["checkpoint"] == older.name
    assert str(victim) in event["skipped"][0]
    (notice,) = (event for event in events(resumed, "notice") if event["kind"] == "damaged")
    assert str(victim) in notice["text"]
    assert f"checkpoint {older.name}, the one before, was used" in notice["text"]


def test_a_run_whose_only_checkpoint_lacks_its_manifest_does_not_begin_anew(tmp_path):
    run = qfleet.train(short(**{"checkpoint.keep": 1}), run_dir=tmp_path / "run")
    (only,) = checkpoint.complete(run.dir / "checkpoints")
    (only / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
        qfleet.resume(run.dir)
