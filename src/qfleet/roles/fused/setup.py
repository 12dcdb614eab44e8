"""Everything a fused loop is built from, besides its handles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qfleet.accel.config import AccelConfig
from qfleet.accel.table import Settings
from qfleet.algo.agent import AgentConfig
from qfleet.algo.exploration import ExplorationConfig
from qfleet.algo.networks import NetworkConfig
from qfleet.algo.optim import OptimConfig
from qfleet.algo.schedules import Schedule
from qfleet.core.spec import EnvSpec
from qfleet.core.usercode import UserCode
from qfleet.envs.tensor.games import TensorConfig
from qfleet.replay import ReplayConfig
from qfleet.roles.actor import ActorConfig
from qfleet.roles.evaluator import EvaluationConfig
from qfleet.roles.learner_setup import LearnerConfig


@dataclass(frozen=True)
class FusedSetup:
    """Everything a fused loop is built from, besides its handles."""

    env: TensorConfig
    spec: EnvSpec
    network: NetworkConfig
    agent: AgentConfig
    exploration: ExplorationConfig
    actor: ActorConfig
    replay: ReplayConfig
    beta: Schedule
    learner: LearnerConfig
    optim: OptimConfig
    evaluation: EvaluationConfig
    accel: AccelConfig
    seed: int
    env_steps: int
    """Budget of the run."""
    total_updates: int
    """How many updates the whole run makes; what schedules are measured against."""
    device: str
    warm_start: Path | None
    """Directory of a model to begin with."""
    warm_start_part: Literal["all", "torso"]
    code: UserCode
    former: Settings | None = None
    """How a run that goes on was computed before."""


def without_effect(setup: FusedSetup) -> list[str]:
    """Return the settings that were changed and are for a pipeline alone."""
    pipeline = {
        "actor.unroll": (setup.actor.unroll, ActorConfig().unroll),
        "learner.publish_period": (setup.learner.publish_period, LearnerConfig().publish_period),
        "learner.snapshot_s": (setup.learner.snapshot_s, LearnerConfig().snapshot_s),
    }
    return [name for name, (given, usual) in pipeline.items() if given != usual]
