"""Presets of qfleet's own small environments: Catch on pixels, the maze on a table, and a task for memory."""

from __future__ import annotations

from qfleet.algo.agent import ReplayAgent, SoftTargetConfig, TabularAgent
from qfleet.algo.exploration import EpsilonGreedyConfig
from qfleet.algo.optim import AdamConfig
from qfleet.algo.recurrent import MemoryConfig
from qfleet.algo.torsos import MlpConfig, SmallCnnConfig, TabularConfig
from qfleet.envs import GymConfig, TensorConfig
from qfleet.experiment import Experiment
from qfleet.replay import PrioritisedConfig, ReplayConfig
from qfleet.roles.actor import ActorConfig
from qfleet.roles.evaluator import EvaluationConfig
from qfleet.roles.learner_setup import LearnerConfig

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


def recall() -> Experiment:
    """Name the cue that was shown ten steps before; guessing scores 0.5, and so does any agent without memory."""
    return Experiment(
        preset="recall",
        algo="r2d2",
        env_steps=30_000,
        env=GymConfig(id="qfleet/Recall-v0"),
        network=MlpConfig(hidden=(32,)),
        agent=ReplayAgent(
            double=True,
            dueling=True,
            n_step=5,
            memory=MemoryConfig(hidden=32, length=12, burn_in=0, period=12),
            target=SoftTargetConfig(tau=0.02),
        ),
        exploration=EpsilonGreedyConfig(start=1.0, end=0.05, steps=10_000),
        actor=ActorConfig(envs=16),
        replay=ReplayConfig(capacity=30_000, sampler=PrioritisedConfig(alpha=0.9, beta_start=0.6, beta_end=0.6)),
        learner=LearnerConfig(batch_size=32, train_period=24, learning_starts=1_000),
        optim=AdamConfig(lr=2e-3),
        evaluation=EvaluationConfig(every=2_000, episodes=50, envs=50, target=1.0),
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
