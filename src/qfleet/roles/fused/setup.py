"""Everything a fused loop is built from, besides its handles."""

from __future__ import annotations

from dataclasses import dataclass, field
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
from qfleet.parallel.plan import ParallelConfig
from qfleet.replay import ReplayConfig
from qfleet.roles.actor import ActorConfig
from qfleet.roles.evaluator import EvaluationConfig
from qfleet.roles.learner_setup import GroupConfig, LearnerConfig


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
    group: GroupConfig | None = None
    """The loop's place among several that learn as one; None for one alone."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """What the loops of a group do together."""

    @property
    def rank(self) -> int:
        """The loop's number in its group."""
        return 0 if self.group is None else self.group.rank

    @property
    def ranks(self) -> int:
        """How many loops learn as one."""
        return 1 if self.group is None else self.group.size

    @property
    def envs(self) -> int:
        """Environments that this loop plays: those from `rank` times as many on of the run's `actor.envs`."""
        return self.actor.envs // self.ranks

    @property
    def batch(self) -> int:
        """Samples that this loop draws for each update."""
        return self.learner.batch_size // self.ranks


def without_effect(setup: FusedSetup) -> list[str]:
    """Return the settings that were changed and are for a pipeline alone."""
    pipeline: dict[str, tuple[object, object]] = {
        "actor.unroll": (setup.actor.unroll, ActorConfig().unroll),
        "learner.publish_period": (setup.learner.publish_period, LearnerConfig().publish_period),
        "learner.weights": (setup.learner.weights, LearnerConfig().weights),
    }
    if setup.group is None or setup.agent.kind == "replay":  # others keep states for a next life
        pipeline["learner.snapshot_s"] = (setup.learner.snapshot_s, LearnerConfig().snapshot_s)
    return [name for name, (given, usual) in pipeline.items() if given != usual]
