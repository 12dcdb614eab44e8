"""Brings a batch of transitions to the learner's device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qfleet.core.tensors import TensorBatch
from qfleet.core.types import Array, Batch, Leaves


def to_tensors(batch: Batch, device: torch.device) -> TensorBatch:
    """Return the batch on the device; on the CPU the tensors share the arrays' memory."""
    return assemble(batch, partial(to_tensor, device=device))


def assemble(batch: Batch, put: Callable[[Array], Tensor]) -> TensorBatch:
    """Return the batch with what `put` makes of each of its arrays, which are put in a fixed order."""
    return TensorBatch(
        observation={name: put(leaf) for name, leaf in batch.observation.items()},
        action=put(batch.action),
        reward=put(batch.reward),
        discount=put(batch.discount),
        next_observation={name: put(leaf) for name, leaf in batch.next_observation.items()},
        weight=put(batch.weight),
        mask=None if batch.mask is None else put(batch.mask),
        next_mask=None if batch.next_mask is None else put(batch.next_mask),
        size=batch.global_size or len(batch.action),
        updates=batch.updates,
    )


def arrays_of(batch: Batch) -> list[Array]:
    """Return the arrays of a batch in the order in which `assemble` puts them."""
    masks = [mask for mask in (batch.mask, batch.next_mask) if mask is not None]
    seen, following = batch.observation.values(), batch.next_observation.values()
    return [*seen, batch.action, batch.reward, batch.discount, *following, batch.weight, *masks]


def form_of(batch: Batch) -> tuple[object, ...]:
    """Return what two batches have in common that `assemble` makes the same of, but for the numbers."""
    names = (*batch.observation, None, *batch.next_observation, batch.mask is None, batch.next_mask is None)
    return (
        batch.global_size or len(batch.action),
        batch.updates,
        names,
        *((array.shape, array.dtype) for array in arrays_of(batch)),
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
