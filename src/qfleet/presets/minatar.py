"""Presets of the five MinAtar games, as tensor-native environments in the fused loop."""

from __future__ import annotations

from qfleet.algo.agent import RolloutAgent
from qfleet.algo.exploration import EpsilonGreedyConfig
from qfleet.algo.optim import AdamConfig
from qfleet.algo.schedules import LinearRateConfig
from qfleet.algo.torsos import SmallCnnConfig
from qfleet.core.errors import ConfigError, did_you_mean
from qfleet.envs import TensorConfig
from qfleet.experiment import Experiment
from qfleet.roles.actor import ActorConfig
from qfleet.roles.evaluator import EvaluationConfig

PUBLISHED = {"breakout": 10.0, "asterix": 17.0, "freeway": 50.0, "seaquest": 20.0, "space_invaders": 44.0}
"""Mean return of the published DQN after 5M frames (Young and Tian, 2019); an evaluation's target."""


def minatar(game: str) -> Experiment:
    """Play a MinAtar game (breakout, asterix, freeway, seaquest, space_invaders) with PQN, fused on one device."""
    name = game.replace("-", "_")
    if name not in PUBLISHED:
        known = ", ".join(PUBLISHED)
        raise ConfigError(f"preset 'minatar:{game}': no such game.{did_you_mean(name, PUBLISHED)} Known: {known}")
    return Experiment(
        preset=f"minatar:{name}",
        algo="pqn",
        env_steps=10_000_000,
        env=TensorConfig(game=f"minatar-{name}"),
        network=SmallCnnConfig(layer_norm=True),
        agent=RolloutAgent(gamma=0.99, q_lambda=0.65, rollout_length=32, epochs=2, minibatches=32),
        exploration=EpsilonGreedyConfig(start=1.0, end=0.05, steps=1_000_000),
        actor=ActorConfig(envs=128),
        optim=AdamConfig(lr=5e-4, max_grad_norm=10.0, schedule=LinearRateConfig(end=0.0)),
        evaluation=EvaluationConfig(every=500_000, episodes=64, envs=64, test_episodes=100, target=PUBLISHED[name]),
    )
