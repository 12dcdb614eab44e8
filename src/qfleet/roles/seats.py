"""How many actors, learners and shards a run may have while it lasts: its settings, and what could be wrong there."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qfleet.core.config import Config


class ElasticConfig(Config):
    """How far a run may grow and shrink while it trains: by `qfleet scale`, and by itself when nodes come and go."""

    automatic: Literal["on", "off"] = "on"
    """Whether actors are begun on Ray nodes that join, moved off those that are to go, and added where they hold the
    learner up while cores are free, and shards where these hold up both; all within the limits below."""
    min_actors: int = Field(1, gt=0, le=10_000)
    """Actors that stay in any case."""
    max_actors: int = Field(0, ge=0, le=10_000)
    """Actors that there may be at most; 0 for as many as there are at first."""
    max_learners: int = Field(0, ge=0, le=1024)
    """Learner ranks that there may be at most; 0 for as many as there are at first."""
    max_shards: int = Field(0, ge=0, le=1024)
    """Replay shards that there may be at most; 0 for as many as there are at first. The replay is cut into so many
    parts, which the shards have among them."""
    settle_s: float = Field(30.0, gt=0)
    """Seconds that a node must have stayed, or actors or shards been too few, before any are added; and between two
    such changes. What a person asks for, or a node that goes, does not wait."""

    def contradictions(
        self,
        actors: int,
        all_actors: int,
        learners: int,
        shards: int,
        batch_size: int,
        scalable: bool,
        regroupable: bool,
    ) -> list[tuple[bool, str]]:
        """Return what could be wrong for a run that begins with so many roles, each with whether it is.

        `all_actors` counts those that begin asleep, too. Of a `scalable` run actors and shards may come and go, of a
        `regroupable` one learner ranks.
        """
        most_actors, most, most_shards = self.max_actors, self.max_learners, self.max_shards
        return [
            (0 < most_actors < all_actors,
             f"elastic.max_actors {most_actors} is below the {all_actors} actors that the run begins with"),
            (self.min_actors > actors,
             f"elastic.min_actors {self.min_actors} exceeds actors {actors}"),
            (most_actors > all_actors and not scalable,
             f"elastic.max_actors {most_actors} needs agent.kind 'replay' and placement 'processes' or 'ray' without"
             " lockstep"),
            (0 < most < learners,
             f"elastic.max_learners {most} is below learners {learners}"),
            (most > learners and not regroupable,
             f"elastic.max_learners {most} is for whole networks that sum their gradients (parallel.update.kind"
             " 'allreduce', no compression, no split), agent.kind 'replay', placement 'processes' or 'ray' without"
             " lockstep, learner.updates_per_draw 1, network.input.normalize False, and no optim.schedule.kind"
             " 'plateau'"),
            (most > batch_size,
             f"elastic.max_learners {most} exceeds learner.batch_size {batch_size}: some would have no work"),
            (0 < most_shards < shards,
             f"elastic.max_shards {most_shards} is below replay.shards {shards}"),
            (most_shards > shards and not scalable,
             f"elastic.max_shards {most_shards} needs agent.kind 'replay' and placement 'processes' or 'ray' without"
             " lockstep"),
            (most_shards > actors,
             f"elastic.max_shards {most_shards} exceeds actors {actors}: some would have no work"),
        ]  # fmt: skip
