"""What a learner is built from: its settings, its place in a group, and the rest of the run that it must know."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from qfleet.accel.config import AccelConfig
from qfleet.algo.agent import AgentConfig
from qfleet.algo.networks import NetworkConfig
from qfleet.algo.optim import OptimConfig
from qfleet.core.config import Config
from qfleet.core.spec import EnvSpec
from qfleet.core.usercode import UserCode
from qfleet.parallel.packing_config import PackingConfig, PlainWeights
from qfleet.parallel.plan import ParallelConfig
from qfleet.parallel.turns import Turns


class LearnerConfig(Config):
    """How the network is trained."""

    batch_size: int = Field(128, gt=0)
    """Transitions of one update (sequences, for an agent with memory), over all learner ranks together."""
    train_period: float = Field(4.0, ge=1 / 256)
    """Environment steps of the whole run for each update; below 1 there are several updates for each step."""
    updates_per_draw: int = Field(1, gt=0, le=256)
    """Updates whose batches a replay shard draws at once: a GPU then makes them without waiting for Python in between.
    Nothing else changes but that priorities are written back, and steps and updates alternate, in larger portions."""
    learning_starts: int = Field(1000, ge=1)
    """Stored transitions before the first update."""
    evaluated: Literal["online", "target"] = "online"
    """Which network is evaluated and kept: a slowly moving target is an average of the online network."""
    publish_period: int = Field(32, gt=0)
    """Updates after which a busy learner publishes weights; an idle one does so at once. Beside other processes both
    do it less often where it would take more than a sixteenth of the learner's time."""
    weights: PackingConfig = PlainWeights()
    """In which form weights travel to actors and inference servers; evaluations and checkpoints have all of them."""
    skips: int = Field(3, gt=0)
    """Non-finite updates in a row that stop the run; a GPU that works ahead may make a few more before it does."""
    snapshot_s: float = Field(10.0, gt=0)
    """Seconds between two states that a learner keeps: what is lost at most when its process dies."""


@dataclass(frozen=True)
class GroupConfig:
    """A learner's place in its data-parallel group."""

    rank: int
    size: int
    rendezvous: str
    """Where the ranks meet; see `parallel.gradsync.GradientGroup`."""
    turns: Turns | None = None
    """How ranks take turns in one process; None where each has its own."""


@dataclass(frozen=True)
class LearnerSetup:
    """Everything a learner is built from, besides its handles."""

    learner: LearnerConfig
    network: NetworkConfig
    agent: AgentConfig
    optim: OptimConfig
    spec: EnvSpec
    seed: int
    total_updates: int
    """How many updates the whole run makes; what schedules are measured against."""
    evaluate_every: int
    """Environment steps between models for the evaluator."""
    env_steps: int
    """Budget of the whole run; the model at its end is sent once, after the last update."""
    device: str
    group: GroupConfig | None
    warm_start: Path | None
    """Directory of a model to begin with."""
    warm_start_part: Literal["all", "torso"]
    code: UserCode
    accel: AccelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """What the ranks of a group do together."""
    whole: ParallelConfig | None = None
    """A plan whose split network is computed as a whole here; None where it is shared as planned."""
    ahead: bool = False
    """Whether the next batch may be on its way while one is learned from: not where roles take turns."""
    shards: int = 1
    """Replay shards from which batches are taken in turn."""
    max_decay: float = 1.0
    """Factor on the maximum priority of several shards at each write-back."""
