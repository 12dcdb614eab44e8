"""Presets of qfleet's own small environments: Catch on pixels, and the maze on a table."""

from __future__ import annotations

from qfleet.algo.agent import ReplayAgent, SoftTargetConfig, TabularAgent
from qfleet.algo.exploration import EpsilonGreedyConfig
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import SmallCnnConfig, TabularConfig
from qfleet.envs import GymConfig, TensorConfig
from qfleet.experiment import Experiment
from qfleet.replay import ReplayConfig
from qfleet.roles.actor import ActorConfig
from qfleet.roles.evaluator import EvaluationConfig
from qfleet.roles.learner import LearnerConfig

MAZE_BEST_RETURN = 0.0
"""Ten steps of -1 and the goal."""


def catch() -> Experiment:
    """Catch a falling ball, seen as 10x5 pixels; solved when none is missed."""
    return Experiment(
        preset="catch",
        algo="nstep",
        env_steps=30_000,
        env=TensorConfig(game="catch"),
        network=SmallCnnConfig(),
        agent=ReplayAgent(double=True, n_step=3, target=SoftTargetConfig(tau=0.02)),
        exploration=EpsilonGreedyConfig(start=1.0, end=0.05, steps=3_000),
        actor=ActorConfig(envs=16),
        replay=ReplayConfig(capacity=30_000),
        learner=LearnerConfig(batch_size=64, train_period=4, learning_starts=500, evaluated="target"),
        optim=AdamConfig(lr=1e-3),
        evaluation=EvaluationConfig(every=1_000, episodes=20, target=1.0),
    )


def maze() -> Experiment:
    """Find the way out of a maze by Q-learning on a table: every step -1, the goal +10; solved by a shortest way."""
    return Experiment(
        preset="maze",
        algo="tabular",
        env_steps=400_000,
        env=GymConfig(id="qfleet/Maze-v0"),
        network=TabularConfig(),
        agent=TabularAgent(gamma=0.9, alpha=0.1),
        # Q-learning learns the best way from any way that goes everywhere: a random one makes all of the table exact.
        exploration=EpsilonGreedyConfig(start=1.0, end=1.0),
        actor=ActorConfig(envs=16),
        evaluation=EvaluationConfig(every=20_000, episodes=1, test_episodes=1, envs=1, target=MAZE_BEST_RETURN),
    )
