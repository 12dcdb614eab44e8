"""Presets of the Atari games: DQN as in Dopamine's published results, and one that is tuned for wall-clock."""

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
    et al. (2018). How the network begins, Adam's settings, exploration and periods are those that Dopamine publishes
    for DQN. Its loss is the square of the error, ours half of it: the gradient is half as long, and so must Adam's
    epsilon be. Its convolutions are padded, too (`network.padding`), which costs 1.7 times the arithmetic.
    The last million frames are kept compressed: 0.5 to 3 GB by the game, where plain ones take 7.1 GB.
    """
    return Experiment(
        preset=f"atari:{game}",
        algo="dqn",
        env_steps=50_000_000,
        env=AtariConfig(game=game, sticky_actions=0.25, noop_max=0, fire_reset=False),
        network=NatureConfig(initialisation="glorot"),
        agent=ReplayAgent(gamma=0.99, loss="mse", target=HardTargetConfig(period=2_000)),
        exploration=EpsilonGreedyConfig(start=1.0, end=0.01, steps=250_000),
        actor=ActorConfig(envs=8),
        replay=ReplayConfig(capacity=1_000_000, storage=Lz4Config()),
        learner=LearnerConfig(batch_size=32, train_period=4, learning_starts=20_000),
        optim=AdamConfig(lr=6.25e-5, eps=1.5e-4 / 2, max_grad_norm=None),
        evaluation=EvaluationConfig(every=250_000, episodes=10, test_episodes=30, envs=10, epsilon=0.001),
        checkpoint=CheckpointConfig(every=1_000_000),
    )


def atari_fast(game: str) -> Experiment:
    """Play an Atari game as soon as possible, as in atari-fast:pong: Double DQN, 24M frames, for machines with a GPU.

    Three-step returns, twice as many updates as `atari`, a larger learning rate and a target that follows four times
    as often; batches are drawn sixteen at a time. The protocol is the same.
    """
    plain = atari(game)
    made: Experiment = plain.replace(
        preset=f"atari-fast:{game}",
        env_steps=6_000_000,
        network=NatureConfig(),
        agent=ReplayAgent(gamma=0.99, n_step=3, double=True, target=HardTargetConfig(period=500)),
        exploration=EpsilonGreedyConfig(start=1.0, end=0.01, steps=200_000),
        replay=ReplayConfig(capacity=500_000, storage=Lz4Config()),
        learner=plain.learner.replace(train_period=2, updates_per_draw=16),
        optim=AdamConfig(lr=1e-4, eps=1.5e-4),
    )
    return made
