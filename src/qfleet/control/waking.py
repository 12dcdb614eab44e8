"""Measures what a message between processes costs besides its content, by a run that has little else to do."""

from __future__ import annotations

from collections.abc import Sequence

from qfleet.algo.torsos import MlpConfig
from qfleet.control.pieces import batch_seconds, experience_seconds
from qfleet.control.rig import Build, Round, play, play_beside, running
from qfleet.core.spec import EnvSpec
from qfleet.envs import GymConfig
from qfleet.experiment import Experiment, with_changes
from qfleet.replay import ReplayConfig
from qfleet.roles.actor import ActorConfig
from qfleet.roles.evaluator import EvaluationConfig
from qfleet.roles.learner_setup import LearnerConfig

FOREVER = 2**60
ROUNDS, ROUND_S = 4, 0.25
"""How often and how long messages are timed, in one process and in several."""
LIGHT = Experiment(
    env=GymConfig(id="qfleet/Identity-v0"),
    env_steps=FOREVER,
    topology="pipeline",
    device="cpu",
    network=MlpConfig(hidden=(16,)),
    actor=ActorConfig(envs=4),
    replay=ReplayConfig(capacity=10_000),
    learner=LearnerConfig(batch_size=32, train_period=64, learning_starts=64),
    evaluation=EvaluationConfig(every=FOREVER),
)
"""Its steps and updates cost next to nothing. With those of a large network or an emulator, what processes take more
is a small difference of large numbers, and says more about these than about messages."""


def wake_seconds(build: Build, spec: EnvSpec) -> float:
    """Return the processor time that a message costs each of its two ends, besides packing, copying and unpacking.

    `build` and `spec` are those of `LIGHT`, which is played in one process and in several. The quietest round of each
    counts: what other programs do to the processor only ever adds to its time.
    """
    with running(build, LIGHT) as rig:
        alone = _quietest([play(rig, ROUND_S, on_gpu=False) for _ in range(ROUNDS)])
    with running(build, with_changes(LIGHT, {"placement": "processes"})) as rig:
        beside = _quietest([play_beside(rig, ROUND_S) for _ in range(ROUNDS)])
    return wake_of(alone, beside, spec)


def _quietest(rounds: Sequence[Round]) -> Round:
    return min(rounds, key=lambda one: one.cpu / max(one.steps, 1))


def wake_of(alone: Round, beside: Round, spec: EnvSpec) -> float:
    """Return it from a round of `LIGHT` in one process and one in several, which take more processor time.

    That is shared by both ends of all messages, those of experience and the batches.
    """
    envs, batch = LIGHT.actor.envs, LIGHT.learner.batch_size
    messages, batches = beside.steps / envs, beside.updates
    more_updates = beside.updates - beside.steps * alone.updates / max(alone.steps, 1)
    own = beside.steps * alone.cpu / max(alone.steps, 1) + more_updates * alone.learner / max(alone.updates, 1)
    packing = messages * experience_seconds(spec, envs) + batches * batch_seconds(spec, batch)
    return max(0.0, beside.cpu - own - packing) / max(2 * messages + 2 * batches, 1.0)
