"""Algorithms learn what they should: a fixed seed, a stated budget, and unseen episodes to judge by."""

from __future__ import annotations

from importlib.util import find_spec

import gymnasium
import numpy as np
import pytest

import qfleet.api as api
from qfleet.observe.record import record_episode
from qfleet.presets import preset
from qfleet.presets.algorithms import ALGORITHMS, apply

FAST = ("dqn", "pqn")
CATCH_SCORE = 0.8
"""Nine balls in ten are caught; a random paddle scores about -0.6."""


def catch_score(algo: str, directory, env_steps: int = 20_000, **changes) -> float:
    """Train on Catch until three evaluations in a row are perfect, or to the budget; score of 100 unseen episodes."""
    experiment = apply(preset("catch"), algo)
    if algo == "iqn":  # fewer fractions than published, for the time this takes on one core
        changes |= {"agent.head.taus": 8, "agent.head.target_taus": 8, "agent.head.acting_taus": 8}
    run = api.train(experiment, seed=1, run_dir=directory / algo, env_steps=env_steps, **changes)
    return run.summary["eval"]["mean"]


@pytest.mark.parametrize("algo", FAST)
def test_two_algorithms_learn_catch(algo, tmp_path):
    assert catch_score(algo, tmp_path) >= CATCH_SCORE


@pytest.mark.slow
@pytest.mark.parametrize("algo", [name for name in ALGORITHMS if name not in (*FAST, "tabular")])
def test_every_algorithm_learns_catch(algo, tmp_path):
    assert catch_score(algo, tmp_path, env_steps=30_000) >= CATCH_SCORE


@pytest.mark.slow
def test_cartpole_is_solved_and_the_kept_model_holds(tmp_path):
    summary = api.train("cartpole", seed=1, run_dir=tmp_path / "run").summary
    assert summary["solved"]
    assert summary["eval"]["episodes"] == 100
    assert summary["eval"]["mean"] >= 475


@pytest.mark.slow
def test_acrobot_is_solved(tmp_path):
    summary = api.train("acrobot", seed=2, run_dir=tmp_path / "run").summary
    assert summary["solved"]
    assert summary["eval"]["mean"] >= -100


def test_the_mazes_table_equals_value_iteration(tmp_path):
    run = api.train("maze", seed=3, run_dir=tmp_path / "run", **{"evaluation.target": None})
    maze = gymnasium.make("qfleet/Maze-v0").unwrapped
    model = maze.model()
    cell, _ = maze.reset(seed=0)
    reached, open_cells = {cell}, [cell]
    while open_cells:
        here = open_cells.pop()
        for there, ends in zip(model.next_state[here].tolist(), model.terminal[here], strict=True):
            if not ends and there not in reached:
                reached.add(there)
                open_cells.append(there)
    cells = np.array(sorted(reached))
    learned = api.load(run.dir).q(cells)
    assert np.abs(learned - model.optimal_q(gamma=0.9)[cells]).max() < 1e-3
    assert run.summary["eval"]["mean"] == 0.0


def test_r2d2_remembers_what_no_agent_without_memory_can(tmp_path):
    """The same task and the same number of steps; guessing scores 0.5."""
    run = api.train("recall", seed=1, run_dir=tmp_path / "r2d2")
    assert run.summary["eval"]["mean"] >= 0.95
    steps = run.summary["env_steps"]
    blind = api.train(apply(preset("recall"), "dqn"), seed=1, run_dir=tmp_path / "dqn", env_steps=steps)
    assert blind.summary["eval"]["mean"] <= 0.7
    assert_plays_recall(api.load(run.dir))
    assert api.evaluate(run.dir, episodes=20, seed=3).mean() >= 0.95
    if find_spec("PIL"):
        recording = record_episode(preset("recall").env, api.load(run.dir), tmp_path / "episode.gif", seed=0)
        assert (recording.score, recording.steps, recording.complete) == (1.0, 12, True)


def assert_plays_recall(policy):
    """Plays side by side, and begins each new episode with a row of zeros in the state."""
    env = gymnasium.make_vec("qfleet/Recall-v0", num_envs=4, vectorization_mode="sync")
    observation, _ = env.reset(seed=0)
    state, scores = policy.initial_state(4), []
    for _ in range(60):
        actions, state = policy.act(observation, state)
        observation, reward, terminated, _, _ = env.step(actions)
        scores += reward[terminated].tolist()
        # Gymnasium resets in the step after the last one, and ignores its action.
        state[observation < 2] = 0
    assert len(scores) >= 16
    assert np.mean(scores) >= 0.95


def test_pong_runs_on_the_compressed_tier(tmp_path):
    pytest.importorskip("ale_py")
    experiment = preset("atari:pong")
    assert experiment.replay.storage.kind == "lz4"
    small = {
        "env_steps": 320,
        "actor.envs": 2,
        "replay.capacity": 4_000,
        "learner.learning_starts": 160,
        "learner.train_period": 16.0,
        "evaluation": {"every": 300, "episodes": 1, "test_episodes": 1, "envs": 1, "max_episode_steps": 20},
    }
    summary = api.train(experiment, seed=1, run_dir=tmp_path / "run", **small).summary
    assert summary["env_steps"] >= 320
    assert summary["updates"] == 10
