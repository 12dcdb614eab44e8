"""Keeps all tensors of a network in one contiguous buffer, so that each operation on the weights is a single one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qfleet.core.errors import ConfigError, QfleetError
from qfleet.core.types import Floats

_ALIGNMENT = 16
"""Bytes to which each tensor's start is aligned: matrix kernels are slower on, and compiled code copies, others."""


class FlatParameters:
    """One float32 tensor that holds what `module.state_dict()` holds, and one for the gradients.

    The module's parameters, persistent buffers and `.grad` become views of them, so the module works as before as long
    as it changes its tensors in place. Make it after the module is on its device; do not move the module afterwards.
    Tied parameters are held once. Buffers of other types (counters, booleans) lie in the same tensor bit by bit.
    Between the tensors are a few zeros of padding, which no operation here or in `Optim` changes.
    """

    parameters: Tensor
    """[P] float32: everything that is optimised."""
    gradients: Tensor
    """[P] float32: the gradients of `parameters`."""
    untrained: Tensor
    """[K] where `parameters` has padding, or values that need no gradient: whatever computes gradients must leave zeros
    there."""
    buffers: Tensor
    """[Q] float32 bits of the persistent buffers: transferred, never optimised or averaged."""

    def __init__(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        _check_types(parameters)
        buffers = _persistent_buffers(module)
        size = sum(_words(parameter) for parameter in parameters.values())
        device = next(module.parameters(), torch.zeros(())).device
        self._values = torch.zeros(size + sum(_words(buffer) for buffer in buffers), device=device)
        self.parameters, self.buffers = self._values[:size], self._values[size:]
        self.gradients = torch.zeros_like(self.parameters)
        for tensor, view in _views([*parameters.values(), *buffers], self._values):
            view.copy_(tensor.detach())
            tensor.data = view
        for parameter, view in _views(parameters.values(), self.gradients):
            parameter.grad = view
        used = torch.zeros(size)
        for parameter, view in _views(parameters.values(), used):
            view.fill_(float(parameter.requires_grad))
        self.untrained = (used == 0).nonzero().flatten().to(device)
        self._places = [(*holder, _place(holder[1][holder[2]])) for holder in _holders(module)]

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        self.gradients.zero_()

    @property
    def values(self) -> Tensor:
        """[P + Q] parameters and buffers, as `to_numpy` copies them; not to be changed."""
        self._check_views()
        return self._values

    def to_numpy(self) -> Floats:
        """Return a copy [P + Q] of parameters and buffers. On a GPU this waits for the device."""
        values = self.values
        return values.numpy().copy() if values.device.type == "cpu" else self._staged().copy_(values).numpy()

    def load_numpy(self, array: Floats) -> None:
        """Overwrite parameters and buffers, in place, with what `to_numpy` of an equal network returned."""
        self._check_views()
        if array.shape != tuple(self._values.shape) or array.dtype != np.float32:
            raise ConfigError(
                f"weights of shape {array.shape} and type {array.dtype} do not fit a network that takes"
                f" {tuple(self._values.shape)} of float32: they belong to a network with other settings"
            )
        # A received array may be a read-only view of shared memory, which torch cannot wrap.
        if self._values.device.type == "cpu":
            np.copyto(self._values.numpy(), array)
        else:
            staged = self._staged()
            np.copyto(staged.numpy(), array)
            self._values.copy_(staged)

    def _staged(self) -> Tensor:
        """Return memory [P + Q] on the host that a GPU copies fast; torch keeps what was given back of it."""
        return torch.empty(self._values.shape, pin_memory=self._values.is_cuda)

    def copy_from(self, other: FlatParameters) -> None:
        """Copy parameters and buffers of an equal network."""
        self._values.copy_(other._values)

    def lerp_from(self, other: FlatParameters, tau: float) -> None:
        """Move the parameters by the fraction `tau` towards another network's; copy its buffers."""
        self.parameters.lerp_(other.parameters, tau)
        self.buffers.copy_(other.buffers)

    def _check_views(self) -> None:
        moved = [name for name, table, key, place in self._places if _place(table.get(key)) != place]
        if moved:
            raise QfleetError(
                f"the network's parts {', '.join(moved)} no longer lie in its flat buffer, so their values would be"
                " lost: do not move a network to another device after it is built, and change its tensors in place"
            )


def checksum(flat: Floats) -> int:
    """Return the sum of a flat array's 64-bit words [P + Q]: at the speed of memory, and any torn copy has another."""
    words = np.ascontiguousarray(flat).view(np.uint32)
    pairs = words[: len(words) // 2 * 2].view(np.uint64)
    return (int(pairs.sum(dtype=np.uint64)) + int(words[len(pairs) * 2 :].sum())) % 2**63


def _holders(module: nn.Module) -> Iterable[tuple[str, dict[str, Any], str]]:
    """Yield the name of each tensor of the module's state and of each submodule, with the table and key it has there.

    To look at these tables costs a tenth of `state_dict()`, and weights are read at every publication.
    """
    for prefix, part in module.named_modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, part._modules)
        for table in tables:
            for key, held in table.items():
                if held is not None and key not in part._non_persistent_buffers_set:
                    yield f"{prefix}.{key}".removeprefix("."), table, key


def _place(held: Any) -> Any:
    """Return what changes when a tensor's memory, or a submodule, is replaced."""
    return held.data_ptr() if isinstance(held, Tensor) else held


def _persistent_buffers(module: nn.Module) -> list[Tensor]:
    """Return what the module's state holds besides its parameters; a tensor with two names comes once."""
    parameters = {id(parameter) for parameter in module.parameters()}
    state = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)}
    return [tensor for key, tensor in state.items() if key not in parameters]


def _check_types(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ConfigError(f"the network's parameter {name} is {parameter.dtype}; make all parameters torch.float32")


def _words(tensor: Tensor) -> int:
    """Return how many float32 words a tensor takes, padding included."""
    size = tensor.numel() * tensor.element_size()
    return -(-size // _ALIGNMENT) * _ALIGNMENT // 4


def _views(tensors: Iterable[Tensor], flat: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield each tensor with a view of `flat` that has its type and shape."""
    start = 0
    for tensor in tensors:
        words = _words(tensor)
        typed = flat[start : start + words].view(tensor.dtype)
        yield tensor, typed[: tensor.numel()].view(tensor.shape)
        start += words
