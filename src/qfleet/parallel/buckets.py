"""Sums gradients over the ranks of a group in pieces, while the backward pass still computes the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qfleet.parallel.group import Group

BUCKET_BYTES = 1 << 20
"""A piece is begun when it has so many bytes: smaller ones cost more messages, larger ones begin later."""


class BucketedSum:
    """A gradient hook; the pieces that autograd has finished are on their way before it is called.

    Gradients that are computed in another way are complete only then, and are summed as a whole. Every rank has the
    same network and so the same pieces in the same order.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._gradients: Tensor | None = None
        self._pieces: list[_Piece] = []
        self._begun = 0

    def attach(self, module: nn.Module, gradients: Tensor, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Watch the gradients of a module's parameters, which are views of `gradients` [P] in the order of the module.

        Backward passes finish them from the last to the first.
        """
        self._gradients = gradients
        self._pieces, end = [], gradients.numel()
        waiting: list[nn.Parameter] = []
        for parameter in reversed(list(module.parameters())):
            waiting.append(parameter)
            assert parameter.grad is not None
            begin = int(parameter.grad.storage_offset() - gradients.storage_offset())
            if (end - begin) * gradients.element_size() >= bucket_bytes:
                self._add(waiting, begin, end)
                waiting, end = [], begin
        if end:
            self._add(waiting, 0, end)

    def __call__(self, gradients: Tensor) -> None:
        """Replace the gradients [P] by their sums over all ranks."""
        if self._gradients is None:
            self._group.all_reduce_(gradients)
            return
        self._begin(len(self._pieces))
        for piece in self._pieces:
            piece.end()
        self._begun = 0

    @property
    def spoiled(self) -> bool:
        """Whether this rank's own part of the last sum was not finite; waits for the device."""
        return any(not bool(piece.finite) for piece in self._pieces)

    def _add(self, parameters: list[nn.Parameter], begin: int, end: int) -> None:
        assert self._gradients is not None
        trained = [parameter for parameter in parameters if parameter.requires_grad]  # no other gets a gradient
        piece = _Piece(self._group, self._gradients[begin:end], len(trained))
        self._pieces.append(piece)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._counting(piece))  # type: ignore[no-untyped-call]

    def _counting(self, piece: _Piece) -> Callable[[Tensor], None]:
        def finished(_: Tensor) -> None:
            piece.missing -= 1
            ready = self._begun
            # In order, or ranks would meet in different sums; the last has the place where a bad loss is told.
            while ready < len(self._pieces) - 1 and self._pieces[ready].missing <= 0:
                ready += 1
            self._begin(ready)

        return finished

    def _begin(self, until: int) -> None:
        for piece in self._pieces[self._begun : until]:
            piece.begin()
        self._begun = max(self._begun, until)


class _Piece:
    """Gradients that lie next to each other."""

    def __init__(self, group: Group, gradients: Tensor, parameters: int) -> None:
        self._group, self._gradients, self._parameters = group, gradients, parameters
        self.missing = parameters
        self.finite = torch.ones((), dtype=torch.bool)
        """Whether this rank's own gradients were, of which the sum leaves nothing."""
        self._work: Any = None

    def begin(self) -> None:
        self.finite = self._gradients.sum().isfinite()
        self._work = self._group.begin_all_reduce(self._gradients)

    def end(self) -> None:
        self._work()
        self.missing = self._parameters
