"""Presets of the Atari games: DQN with the settings and the protocol of Dopamine's published results."""

from __future__ import annotations

from qfleet.algo.agent import HardTargetConfig, ReplayAgent
from qfleet.algo.exploration import EpsilonGreedyConfig
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import NatureConfig
from qfleet.envs import AtariConfig
from qfleet.experiment import CheckpointConfig, Experiment
from qfleet.replay import ReplayConfig
from qfleet.replay.storage import Lz4Config
from qfleet.roles.actor import ActorConfig
from qfleet.roles.evaluator import EvaluationConfig
from qfleet.roles.learner_setup import LearnerConfig


def atari(game: str) -> Experiment:
    """Play an Atari game from pixels, as in atari:pong (extra: atari): DQN, 200M frames, sticky actions.

    Sticky actions of 0.25 in place of random starts, and games (not lives) as episodes, are the protocol of Machado
    et al. (2018). The network, Adam's settings, exploration and periods are those that Dopamine publishes for DQN.
    The last million frames are kept compressed: 0.5 to 3 GB by the game, where plain ones take 7.1 GB.
    """
    return Experiment(
        preset=f"atari:{game}",
        algo="dqn",
        env_steps=50_000_000,
        env=AtariConfig(game=game, sticky_actions=0.25, noop_max=0, fire_reset=False),
        network=NatureConfig(),
        agent=ReplayAgent(gamma=0.99, target=HardTargetConfig(period=2_000)),
        exploration=EpsilonGreedyConfig(start=1.0, end=0.01, steps=250_000),
        actor=ActorConfig(envs=8),
        replay=ReplayConfig(capacity=1_000_000, storage=Lz4Config()),
        learner=LearnerConfig(batch_size=32, train_period=4, learning_starts=20_000),
        optim=AdamConfig(lr=6.25e-5, eps=1.5e-4),
        evaluation=EvaluationConfig(every=250_000, episodes=10, test_episodes=30, envs=10, epsilon=0.001),
        checkpoint=CheckpointConfig(every=1_000_000),
    )
