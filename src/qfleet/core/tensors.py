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
    updates: int = 1
    """How many updates are made from it, each from as large a part of the items, in their order."""

    def split(self, count: int) -> list[TensorBatch]:
        """Return `count` equally large batches, of one update each, in place of this one."""
        seen, following = _split_leaves(self.observation, count), _split_leaves(self.next_observation, count)
        lines = (self.action, self.reward, self.discount, self.weight)
        action, reward, discount, weight = (split(line, count) for line in lines)
        mask, next_mask = (
            (None,) * count if mask is None else split(mask, count) for mask in (self.mask, self.next_mask)
        )
        return [
            TensorBatch(
                observation=seen[i],
                action=action[i],
                reward=reward[i],
                discount=discount[i],
                next_observation=following[i],
                weight=weight[i],
                mask=mask[i],
                next_mask=next_mask[i],
                size=self.size // count,
            )
            for i in range(count)
        ]


def split(values: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return `count` equally large parts of values [B, ...] that are contiguous, in their order."""
    return values.view(count, -1, *values.shape[1:]).unbind()


def _split_leaves(leaves: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    parts = {name: split(leaf, count) for name, leaf in leaves.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(count)]
