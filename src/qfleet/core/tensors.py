"""What losses read and device replays draw: a batch of transitions as tensors on one device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TensorBatch:
    """The part of a `core.types.Batch` that a loss reads; see there for the meaning of each field."""

    observation: dict[str, Tensor]  # [B, ...]
    action: Tensor  # [B] int64
    reward: Tensor  # [B]
    discount: Tensor  # [B]
    next_observation: dict[str, Tensor]  # [B, ...]
    weight: Tensor  # [B]
    mask: Tensor | None  # [B, A] bool
    next_mask: Tensor | None  # [B, A] bool
    size: int
    """Size of the whole batch over all learner ranks."""
