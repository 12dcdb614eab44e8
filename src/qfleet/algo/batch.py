"""Brings a batch of transitions to the learner's device."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.core.tensors import TensorBatch
from qfleet.core.types import Array, Batch, Leaves


def to_tensors(batch: Batch, device: torch.device) -> TensorBatch:
    """Return the batch on the device; on the CPU the tensors share the arrays' memory."""
    return TensorBatch(
        observation=leaves_to_tensors(batch.observation, device),
        action=to_tensor(batch.action, device),
        reward=to_tensor(batch.reward, device),
        discount=to_tensor(batch.discount, device),
        next_observation=leaves_to_tensors(batch.next_observation, device),
        weight=to_tensor(batch.weight, device),
        mask=None if batch.mask is None else to_tensor(batch.mask, device),
        next_mask=None if batch.next_mask is None else to_tensor(batch.next_mask, device),
        size=batch.global_size or len(batch.action),
    )


def leaves_to_tensors(leaves: Leaves, device: torch.device) -> dict[str, Tensor]:
    """Return each leaf as a tensor on the device."""
    return {name: to_tensor(leaf, device) for name, leaf in leaves.items()}


def to_tensor(array: Array, device: torch.device) -> Tensor:
    """Return an array as a tensor on the device; on the CPU it shares the array's memory."""
    if not array.flags.writeable:  # received from shared memory, say: torch cannot wrap it without a warning
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
