"""The preset for any environment with Gymnasium's interface: sound settings chosen from its spaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from qfleet.algo.agent import ReplayAgent, SoftTargetConfig
from qfleet.algo.exploration import EpsilonGreedyConfig
from qfleet.algo.inputs import InputConfig
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import MlpConfig, NatureConfig, SmallCnnConfig
from qfleet.core.spec import PLAIN, LeafSpec
from qfleet.envs import GymConfig, env_spec
from qfleet.experiment import Experiment
from qfleet.replay import ReplayConfig
from qfleet.roles.actor import ActorConfig
from qfleet.roles.evaluator import EvaluationConfig
from qfleet.roles.learner_setup import LearnerConfig

NATURE_SIDE = 36
"""The smallest image that the Nature network's three convolutions can take."""
FRAME_STACK = 4
"""A single picture shows no speeds."""
ONE_HOT_CATEGORIES = 64
"""With more categories than this a learned vector for each is the better input."""
REPLAY_BYTES = 2 * 2**30
"""What the observations in the replay may take."""


def registered(env_id: str, factory: Callable[[], Any] | None = None) -> Experiment:
    """Play any registered environment, as in gym:LunarLander-v3 or gym:my_module:MyEnv-v0.

    The environment is made once, to look at its spaces. A `factory` makes it in place of the id, which then is a name.
    """
    env = GymConfig(id=env_id)
    leaves = env_spec(env, factory).observations
    network = _network(leaves)
    pixels = isinstance(network, NatureConfig)
    if pixels and tuple(leaves) == (PLAIN,):
        env = env.replace(frame_stack=FRAME_STACK)
    steps = 1_000_000 if pixels else 200_000
    row_bytes = sum(leaf.frame_bytes for leaf in leaves.values())
    return Experiment(
        preset=f"gym:{env_id}",
        algo="nstep",
        env_steps=steps,
        env=env,
        network=network,
        agent=ReplayAgent(double=True, n_step=3, gamma=0.99, target=SoftTargetConfig(tau=0.005)),
        exploration=EpsilonGreedyConfig(start=1.0, end=0.05, steps=steps // 10),
        actor=ActorConfig(envs=8),
        replay=ReplayConfig(capacity=min(steps // 2, max(REPLAY_BYTES // row_bytes, 10_000))),
        # Nothing is known of the size of the rewards, so their spread is measured.
        normalise_rewards=True,
        learner=LearnerConfig(batch_size=32 if pixels else 128, train_period=4, learning_starts=steps // 200),
        optim=AdamConfig(lr=1e-4 if pixels else 5e-4),
        evaluation=EvaluationConfig(every=steps // 40, episodes=10, envs=10),
    )


def _network(leaves: dict[str, LeafSpec]) -> MlpConfig | NatureConfig | SmallCnnConfig:
    categories = max((leaf.categories or 0 for leaf in leaves.values()), default=0)
    embedding = math.isqrt(categories) if categories > ONE_HOT_CATEGORIES else 0
    inputs = InputConfig(normalize=True, embedding=embedding)
    images = [leaf for leaf in leaves.values() if _is_image(leaf)]
    if not images:
        return MlpConfig(hidden=(256, 256), input=inputs)
    if all(min(_sides(leaf)) >= NATURE_SIDE for leaf in images):
        return NatureConfig(input=inputs)
    return SmallCnnConfig(input=inputs)


def _is_image(leaf: LeafSpec) -> bool:
    """Return whether neighbouring elements belong together: planes with channels, or plain grids of pixels."""
    return len(leaf.frame_shape) == 3 or (len(leaf.frame_shape) == 2 and leaf.dtype in ("uint8", "bool"))


def _sides(leaf: LeafSpec) -> tuple[int, ...]:
    """Return height and width; the third axis of an image, its channels, is the smallest one."""
    return tuple(sorted(leaf.frame_shape)[-2:])
