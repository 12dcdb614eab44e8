"""The parallel plan: how several learners share the work of one update, and what travels between them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qfleet.core.config import Config
from qfleet.parallel.compression.config import CompressionConfig, NoCompressionConfig
from qfleet.parallel.local import LocalConfig
from qfleet.parallel.serving import ServerConfig


class AllReduceConfig(Config):
    """Every update's gradients are summed over all ranks, which go on with equal weights."""

    kind: Literal["allreduce"] = "allreduce"


class ShardedConfig(Config):
    """Like allreduce, but each rank keeps its part of the weights only, and gathers a layer when it needs it (FSDP)."""

    kind: Literal["sharded"] = "sharded"


UpdateConfig = Annotated[AllReduceConfig | ShardedConfig | LocalConfig | ServerConfig, Field(discriminator="kind")]


class ParallelConfig(Config):
    """How one update is shared; `learners` says by how many replicas. The global batch never depends on any of it."""

    tensor: int = Field(1, gt=0, le=64)
    """Ranks that share the channels of each layer of a replica."""
    pipeline: int = Field(1, gt=0, le=64)
    """Stages, each a rank, that the layers of a replica are divided into."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """In which order a stage works on its micro-batches: all forwards first, or each backward as soon as it can."""
    micro_batches: int = Field(4, gt=0)
    """Parts that a replica's batch is sent through the stages in."""
    update: UpdateConfig = AllReduceConfig()
    """How replicas agree: by sums of gradients (of whole networks, or sharded), by parameter servers, or by meetings
    now and then."""
    compression: CompressionConfig = NoCompressionConfig()
    """In which form gradients travel between replicas, or to servers."""
    after_death: Literal["same", "fewer"] = "same"
    """With how many ranks a group goes on when one of them dies: with the same number, or with one fewer each time,
    until one is left. The batch stays the same; a resumed run has all of them again."""
    across_nodes: bool = False
    """Let ranks be on other nodes of a Ray cluster where the driver's has no GPU, or CPU, left for them. What they send
    each other is neither encrypted nor signed: only for a network where nobody else is."""

    @property
    def split(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.pipeline

    @property
    def sharded(self) -> bool:
        """Whether replicas keep a part of the weights each."""
        return isinstance(self.update, ShardedConfig)

    @property
    def in_pieces(self) -> bool:
        """Whether no rank has a whole network."""
        return self.split > 1 or self.sharded

    @property
    def assembled(self) -> ParallelConfig:
        """The plan of as many replicas, each of them whole."""
        update = AllReduceConfig() if self.sharded else self.update
        whole: ParallelConfig = self.replace(tensor=1, pipeline=1, update=update)
        return whole

    def contradictions(self, learners: int, batch_size: int, transitions: bool) -> list[tuple[bool, str]]:
        """Return what could be wrong with the plan for a run of so many replicas, each with whether it is.

        `transitions` says whether the agent learns from single transitions of a replay.
        """
        update, share = self.update, batch_size // learners
        degrees = {"tensor": self.tensor, "pipeline": self.pipeline}
        splits = " and ".join(f"parallel.{name} {degree}" for name, degree in degrees.items() if degree > 1)
        by_update = f"parallel.update.kind '{update.kind}'"
        pieces = splits if self.split > 1 else by_update
        servers = update.servers if isinstance(update, ServerConfig) else 0
        fewer = self.after_death == "fewer"
        return [
            ((self.in_pieces or servers > 0) and not transitions,
             f"{pieces} needs an agent that learns from single transitions of a replay, such as algo dqn"),
            (self.split > 1 and update.kind not in ("allreduce", "sharded"),
             f"parallel.update.kind '{update.kind}' is for whole networks, not with {splits}: use 'allreduce'"),
            (self.sharded and self.pipeline > 1,
             f"{by_update} needs parallel.pipeline 1, not {self.pipeline}: stages divide a network already"),
            (self.sharded and learners == 1,
             f"{by_update} needs learners 2 or more: one alone keeps everything"),
            (self.in_pieces and self.compression.kind != "none",
             f"parallel.compression.kind '{self.compression.kind}' is for whole networks, not with {pieces}"),
            (self.pipeline > 1 and (batch_size % learners != 0 or share % self.micro_batches != 0),
             f"parallel.pipeline {self.pipeline} needs equal micro-batches: learner.batch_size {batch_size}"
             f" is not a multiple of learners {learners} times parallel.micro_batches {self.micro_batches}"),
            (isinstance(update, ServerConfig) and update.mode == "async" and update.max_staleness < learners - 1,
             f"parallel.update.max_staleness {getattr(update, 'max_staleness', 0)} is below {learners - 1}: so many"
             f" gradients come from the others while one of learners {learners} computes, and none could be taken"),
            (update.kind == "local" and learners == 1,
             "parallel.update.kind 'local' needs learners 2 or more: one alone has nobody to meet"),
            (fewer and (learners == 1 or self.in_pieces or servers > 0),
             "parallel.after_death 'fewer' is for learners 2 or more with whole networks that sum their gradients or"
             " meet"),
            (self.compression.kind != "none" and learners == 1 and not servers,
             f"parallel.compression.kind '{self.compression.kind}' needs learners 2 or more: one alone sends nothing"),
        ]  # fmt: skip
