"""Gradients as one bit a value: its sign. Sizes are told for rows and columns of each layer's matrix.

The gradient of a layer is a sum of products, of what an output is off by and what an input is. So the sizes of its
values are nearly products, too: one factor for the row, one for the column. An optimiser that divides each value by its
usual size, as Adam does, needs to see that outputs and inputs differ; a mean size for a stretch of values hides it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qfleet.parallel.compression.codec import Codec, Payload
from qfleet.parallel.compression.powersgd import Matrix

LEAST = 2048
"""Values that a matrix must have to get factors of its own."""

VALUES = 200
"""Values for which one factor may be told: a byte for 25 bytes of signs."""

STRETCH = 256
"""Neighbours that share a size where there is no matrix."""

_STEPS = 8
"""Levels of a factor in each power of two: at most 4 % off."""

_GATHER_BITS = 0x0102040810204080
"""Times eight bytes of 0 or 1 in a word, gives their bits in its highest byte, the first byte's lowest."""


class SignCodec(Codec):
    """Each value as its sign, times a size that it shares with others.

    Sizes are those of the nearest such vector, so that a payload never leaves more out than there was. Zeros become
    positive; fed back, the error makes them negative the next time.
    """

    def __init__(self, layers: Sequence[Matrix], size: int, device: torch.device) -> None:
        self._size = size
        large = sorted((m for m in layers if m.rows * m.columns >= LEAST), key=lambda m: m.start)
        self._factored = [_Factored(matrix) for matrix in large]
        ends = zip([0, *(m.stop for m in large)], [*(m.start for m in large), size], strict=True)
        self._rest = [(start, stop) for start, stop in ends if stop > start]
        self._positive = torch.zeros(-(-size // 8) * 8, dtype=torch.bool, device=device)
        self._signs_room = torch.zeros(-(-size // 8), 8, device=device)
        self._sizes_room = torch.zeros(size, device=device)
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
        self._signs = bits.float() * 2 - 1
        levels = torch.tensor([0.0] + [2.0 ** ((level - 255) / _STEPS) for level in range(1, 256)])
        self._levels = levels.to(device)

    def encode(self, vector: Tensor) -> Payload:
        """Return scales of the matrices and of the rest, factors of one byte, and signs [P / 8], eight to a byte."""
        sizes = torch.abs(vector, out=self._sizes_room)
        scales, factors = [], []
        for layer in self._factored:
            rows, columns = (self._nearest(means) for means in layer.means(sizes))
            scales.append(layer.scale(sizes, self._levels[rows.int()], self._levels[columns.int()]))
            factors += [rows, columns]
        if self._rest:
            means = _shared_means(torch.cat([sizes[start:stop] for start, stop in self._rest]), STRETCH)
            scales.append(means.amax())
            factors.append(self._nearest(means))
        torch.ge(vector, 0, out=self._positive[: self._size])
        packed = ((self._positive.view(torch.int64) * _GATHER_BITS) >> 56).to(torch.uint8)
        return [torch.stack(scales), torch.cat(factors), packed] if scales else [sizes.clone(), packed, packed]

    def add(self, payload: Payload, out: Tensor, alpha: float = 1.0) -> None:
        """Add the signs times their sizes to a vector [P]."""
        scales, factors, packed = payload
        torch.index_select(self._signs, 0, packed.int(), out=self._signs_room)
        sizes = self._sizes(scales, self._levels.index_select(0, factors.int()))
        out.addcmul_(self._signs_room.view(-1)[: self._size], sizes, value=alpha)

    def _sizes(self, scales: Tensor, factors: Tensor) -> Tensor:
        """Return the size of each value [P], from the payload's scales and factors."""
        sizes, place = self._sizes_room, 0
        for layer, scale in zip(self._factored, scales, strict=False):
            rows = factors[place : (place := place + layer.row_factors)]
            columns = factors[place : (place := place + layer.column_factors)]
            layer.write(rows * scale, columns, sizes)
        rest = (factors[place:] * scales[-1:]).repeat_interleave(STRETCH)
        for start, stop in self._rest:
            sizes[start:stop], rest = rest[: stop - start], rest[stop - start :]
        return sizes

    def _nearest(self, means: Tensor) -> Tensor:
        """Return the levels [N] nearest to means [N], the largest of which is level 255; what is too small is 0."""
        relative = means / means.amax().clamp(min=torch.finfo(means.dtype).tiny)
        return relative.log2_().mul_(_STEPS).add_(255.5).clamp_(min=0.0).to(torch.uint8)


class _Factored:
    """A matrix whose rows and columns have factors; neighbours share one where there would be too many."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self._rows_each = self._columns_each = 1
        while self.row_factors + self.column_factors > matrix.rows * matrix.columns // VALUES:
            if self.column_factors >= self.row_factors:
                self._columns_each *= 2
            else:
                self._rows_each *= 2

    @property
    def row_factors(self) -> int:
        """Factors for the rows."""
        return -(-self._matrix.rows // self._rows_each)

    @property
    def column_factors(self) -> int:
        """Factors for the columns."""
        return -(-self._matrix.columns // self._columns_each)

    def means(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean sizes of the rows [R] and of the columns [C] that share a factor, of all sizes [P]."""
        matrix = self._matrix.of(sizes)
        return _shared_means(matrix.mean(1), self._rows_each), _shared_means(matrix.mean(0), self._columns_each)

    def scale(self, sizes: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return by how much the product of factors [R] and [C] is nearest to the matrix; sizes are of all [P]."""
        wide_rows, wide_columns = self._wide(rows, columns)
        common = torch.dot(wide_rows, self._matrix.of(sizes) @ wide_columns)
        own = torch.dot(wide_rows, wide_rows) * torch.dot(wide_columns, wide_columns)
        return common / own.clamp(min=torch.finfo(own.dtype).tiny)

    def write(self, rows: Tensor, columns: Tensor, sizes: Tensor) -> None:
        """Write the product of factors [R] and [C] to its place among all sizes [P]."""
        wide_rows, wide_columns = self._wide(rows, columns)
        torch.mul(wide_rows[:, None], wide_columns, out=self._matrix.of(sizes))

    def _wide(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of every row and column."""
        wide_rows = rows.repeat_interleave(self._rows_each)[: self._matrix.rows]
        return wide_rows, columns.repeat_interleave(self._columns_each)[: self._matrix.columns]


def _shared_means(values: Tensor, each: int) -> Tensor:
    """Return the mean of every `each` neighbours [N / each]; the last ones may be fewer."""
    if each == 1:
        return values
    whole = len(values) // each * each
    parts = values[:whole].view(-1, each).mean(1)
    return parts if whole == len(values) else torch.cat([parts, values[whole:].mean().view(1)])
