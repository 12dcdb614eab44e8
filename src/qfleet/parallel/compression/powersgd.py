"""Gradients as products of thin matrices, one for each layer, found by one power iteration an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qfleet.core.role import State
from qfleet.parallel.compression.codec import Codec, Payload, Wire


@dataclass(frozen=True)
class Matrix:
    """Where a parameter lies in the flat vector, seen as a matrix of one row for each output."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """The first position behind it."""
        return self.start + self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        """Return its view [rows, columns] of a flat vector."""
        return flat[self.start : self.stop].view(self.rows, self.columns)

    def within(self, start: int, stop: int) -> Matrix:
        """Return those of its rows that lie wholly in a slice of the vector, counted from the slice's start."""
        first = max(0, -((self.start - start) // self.columns))
        last = min(self.rows, (stop - self.start) // self.columns)
        return Matrix(self.start + first * self.columns - start, max(0, last - first), self.columns)


def matrices(parameters: Iterable[Tensor]) -> list[Matrix]:
    """Return where those with two dimensions or more lie; all are views of one flat tensor, from its start."""
    return [
        Matrix(int(parameter.storage_offset()), len(parameter), parameter.numel() // len(parameter))
        for parameter in parameters
        if parameter.dim() > 1 and parameter.numel()
    ]


class PowerSgdCodec(Codec):
    """Writes each matrix M as L Rᵀ: L an orthonormal basis of M R_before, R = Mᵀ L. All else goes as it is.

    Both steps are linear, so a group sums thin matrices over its ranks in place of gathering them. R starts where it
    was at the update before; at first it is random, and the same on all ranks.
    """

    def __init__(self, rank: int, layers: Sequence[Matrix], size: int, device: torch.device) -> None:
        self._rank = rank
        layers = sorted(layers, key=lambda m: m.start)
        self._matrices = [m for m in layers if (m.rows + m.columns) * rank < m.rows * m.columns]
        stops, starts = [0, *(m.stop for m in self._matrices)], [*(m.start for m in self._matrices), size]
        self._plain = list(zip(stops, starts, strict=True))
        self._lefts = [m.rows * rank for m in self._matrices]
        self._rights = [m.columns * rank for m in self._matrices]
        self._right = torch.randn(sum(self._rights), generator=torch.Generator().manual_seed(0)).to(device)

    def encode(self, vector: Tensor) -> Payload:
        """Return all L, all R, and the values that are in no matrix, each one after the other."""
        return self.share(vector, _Alone())[0]

    def add(self, payload: Payload, out: Tensor, alpha: float = 1.0) -> None:
        """Add the products and the other values to a vector [P]."""
        left, right, plain = payload
        thin = zip(self._matrices, self._thin(left, self._lefts), self._thin(right, self._rights), strict=True)
        for matrix, matrix_left, matrix_right in thin:
            matrix.of(out).addmm_(matrix_left, matrix_right.T, alpha=alpha)
        pieces = torch.split_with_sizes(plain, [stop - start for start, stop in self._plain])
        for (start, stop), piece in zip(self._plain, pieces, strict=True):
            out[start:stop].add_(piece, alpha=alpha)

    def share(self, vector: Tensor, wire: Wire) -> tuple[Payload, list[Payload]]:
        """Sum twice: the bases with all else, then what this rank's matrices are in the common basis."""
        views = [matrix.of(vector) for matrix in self._matrices]
        plain = torch.cat([vector[start:stop] for start, stop in self._plain])
        before = self._thin(self._right, self._rights)
        seen = [(view @ right).view(-1) for view, right in zip(views, before, strict=True)]
        summed = wire.total(torch.cat([*seen, plain]))
        bases, all_plain = torch.split_with_sizes(summed, [sum(self._lefts), len(plain)])
        lefts = [torch.linalg.qr(basis).Q for basis in self._thin(bases, self._lefts)]
        right = _joined([view.T @ left for view, left in zip(views, lefts, strict=True)], vector)
        self._right = wire.total(right)
        left = _joined(lefts, vector)
        return [left, right, plain], [[left, self._right, all_plain]]

    def _thin(self, flat: Tensor, lengths: list[int]) -> list[Tensor]:
        """Return the matrices [length / rank, rank] that lie one after the other in a vector."""
        return [part.view(-1, self._rank) for part in torch.split_with_sizes(flat, lengths)]

    def state_dict(self) -> State:
        """Return all R, where the next iteration starts."""
        return {"right": self._right.clone()}

    def load_state_dict(self, state: State) -> None:
        """Continue from the saved R."""
        self._right = state["right"].to(self._right.device, copy=True)


class _Alone:
    """The wire of a rank that has no others."""

    size = 1

    def total(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, payload: Payload) -> list[Payload]:
        return [payload]


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Return all values one after the other; an empty vector of the other's kind if there are none."""
    return torch.cat([like[:0], *(part.reshape(-1) for part in parts)])
