"""Adds the small network's partial sums, in a fixed order, and writes them to the flat gradient in one launch."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from qfleet.accel.kernels.small_cnn import rounds_for

_ENTRIES = 32
"""Entries of the gradient that one program adds up."""
_TOGETHER = 64
"""Partial sums that are read before the first is added."""


class Sums(NamedTuple):
    """Partial sums of some layers, and where their totals go."""

    parts: Tensor  # [programs, N] float32
    places: Tensor  # [N] int32, in the flat gradient


def fold(dense: Sums, conv: Sums, terms: Tensor, gradients: Tensor, metrics: Tensor) -> None:
    """Write totals to the flat `gradients` [P], and those of `terms` [programs, 2] to `metrics` [2]."""
    blocks = [triton.cdiv(len(sums.places), _ENTRIES) for sums in (dense, conv)]
    _fold_kernel[(sum(blocks),)](
        *dense, *conv, terms, gradients, metrics,
        blocks[0], len(dense.places), len(conv.places), len(dense.parts), len(conv.parts),
        dense_rounds=rounds_for(len(dense.parts), _TOGETHER), conv_rounds=rounds_for(len(conv.parts), _TOGETHER),
        block=_ENTRIES, together=_TOGETHER,
    )  # fmt: skip


@triton.jit
def _fold_kernel(
    dense_parts, dense_places, conv_parts, conv_places, terms, gradients, metrics,
    dense_blocks, dense_width, conv_width, dense_count, conv_count,
    dense_rounds: tl.constexpr, conv_rounds: tl.constexpr, block: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < dense_blocks:
        first = program * block
        _fold_block(
            dense_parts, dense_places, gradients, first, dense_width, dense_count, dense_rounds, block, together
        )
    else:
        first = (program - dense_blocks) * block
        _fold_block(conv_parts, conv_places, gradients, first, conv_width, conv_count, conv_rounds, block, together)
    if program == 0:
        metric = tl.arange(0, 2)
        tl.store(metrics + metric, _total(terms, metric, 2, dense_count, dense_rounds, 2, together))


@triton.jit
def _fold_block(
    parts, places, gradients, first, width, count, rounds: tl.constexpr, block: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    entry = first + tl.arange(0, block)
    place = tl.load(places + entry, mask=entry < width, other=0)
    total = _total(parts, entry, width, count, rounds, block, together)
    tl.store(gradients + place, total, mask=entry < width)


@triton.jit
def _total(parts, entry, width, count, rounds: tl.constexpr, block: tl.constexpr, together: tl.constexpr):
    """Return the sums [block] of columns of `parts` [count, width]."""
    total = tl.zeros((block,), tl.float32)
    for turn in range(rounds):
        part = turn * together + tl.arange(0, together)
        mask = (part < count)[:, None] & (entry < width)[None, :]
        total += tl.sum(tl.load(parts + part[:, None] * width + entry[None, :], mask=mask, other=0.0), axis=0)
    return total
