"""What one environment step, update and message of an experiment cost on a machine; kept in the user's cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field

from qfleet.control.kept import KeptFile
from qfleet.core.config import Config

Curve = tuple[tuple[int, float], ...]
"""Seconds by size, sizes rising."""
QUIET = 0.8
"""Below this share of the processor time, what was measured says as much about other programs as about the run."""


class LearnerCost(Config):
    """What learning costs in one way."""

    device: Literal["cpu", "cuda"]
    """Where updates are computed."""
    threads: int = Field(gt=0)
    """How many threads compute them."""
    updates_per_draw: int = Field(1, gt=0)
    """Updates whose batches are drawn at once."""
    seconds: float = Field(ge=0)
    """For each environment step: updates and the publishing of weights."""
    replay: float | None = Field(None, ge=0)
    """Storing and drawing for such a learner, for each environment step; None if it is as for any other."""
    batch_message: float | None = Field(None, ge=0)
    """Packing, copying and unpacking the batch of one update for it; None if it is as for any other."""


class Measurements(Config):
    """Seconds of work; everything but a learner with several threads is on one core."""

    env_tick: Curve
    """One step of all environments of a vector, by how many they are; random actions."""
    act: Curve
    """Values of a batch of observations on one core, by its size."""
    act_bf16: Curve = ()
    """The same in bf16; empty where that cannot be."""
    act_cuda: Curve = ()
    """The same on the GPU with the copies to it and back; empty without one."""
    request_message: Curve
    """Packing, copying and unpacking a batch of observations on its way to an inference server, by its size."""
    actor_tick: Curve
    """One tick of a whole actor, by its environments: acting, stepping, writing down."""
    actor_cpu: Curve
    """Processor time of such a tick, which is more where environments step in threads or processes of their own."""
    two_groups: float | None = Field(None, gt=0)
    """Length of a tick with actor.groups 2, as a part of that with 1; None where that can gain nothing."""
    replay: float = Field(ge=0)
    """Storing and drawing, for each environment step; 0 without a replay."""
    learners: tuple[LearnerCost, ...] = Field(min_length=1)
    """Learning, in each way that was tried."""
    updates_per_step: float = Field(ge=0)
    """Gradient steps for each environment step."""
    batches_per_step: float = Field(ge=0)
    """Batches from the replay to the learner for each environment step, several in one message or not."""
    experience_message: Curve
    """Packing, copying and unpacking the rows of one message, by how many they are."""
    batch_message: float = Field(ge=0)
    """The same for a batch; 0 without a replay."""
    wake: float = Field(ge=0)
    """Processor time that a message costs each of its two ends in processes, besides packing, copying and unpacking."""
    cpu_share: float = Field(ge=0, le=1)
    """Processor time that playing inline took, as a part of its length: less than 1 where environments sleep, or
    others ran beside it."""
    core_share: float = Field(0.0, ge=0, le=1)
    """Share of a core that was there for the taking meanwhile, which tells the one from the other."""
    row_bytes: int = Field(ge=0)
    """Of one stored environment step, before compression."""
    batch_bytes: int = Field(ge=0)
    """Of one batch."""
    copy_bytes_per_s: float | None = None
    """From pinned memory to the GPU; None without one."""

    @property
    def quiet(self) -> bool:
        """Whether nothing else kept the machine busy meanwhile."""
        return max(self.cpu_share, self.core_share) >= QUIET


KNOWN = KeptFile("measurements.json", Measurements)
"""What was measured before on this machine."""


def at(curve: Curve, size: float) -> float:
    """Return the seconds at a size: between two measured sizes and beyond the last along the line through them.

    Below the first size it falls towards that line's start, but not below 0.
    """
    if len(curve) == 1:
        return curve[0][1] * size / curve[0][0]
    low, high = next((pair for pair in pairwise(curve) if size <= pair[1][0]), (curve[-2], curve[-1]))
    slope = max(0.0, (high[1] - low[1]) / (high[0] - low[0]))
    return max(0.0, low[1] + slope * (size - low[0]))
