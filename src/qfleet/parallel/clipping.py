"""Sums, measures and clips a gradient of which every rank has a share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qfleet.algo.steps import GradientHook
from qfleet.parallel.mesh import Mesh, sharers

_TINY = 1e-6
"""Keeps the clipped norm just below its limit, as the unsplit optimiser does."""


class SplitClip:
    """A gradient hook: the sum over replicas, unless it was made, then the global norm and its limit, on all ranks.

    A gradient that is not finite on any rank becomes NaN everywhere on all, so that all leave the step out.
    """

    norm: Tensor
    """Scalar: the global norm of the last gradient before clipping."""

    counted: Tensor
    """[p] or scalar ones, with zeros where another rank counts the same entries; to be set before the first step."""

    def __init__(self, mesh: Mesh, limit: float | None, hook: GradientHook | None, sharded: bool) -> None:
        """Take the largest norm, if there is one, and what sums over replicas in place of the mesh, if anything.

        Of a sharded network each replica has its share of the sum already.
        """
        self._mesh, self._hook, self._summed = mesh, hook, sharded
        self._limit = math.inf if limit is None else limit

    def __call__(self, gradients: Tensor) -> None:
        """Change the share [p] in place; all ranks must call it together."""
        if self._hook is not None:
            self._hook(gradients)
        elif not self._summed:
            self._mesh.sum_(gradients, "data")
        # In double precision: on a CPU, float32 sums of millions of squares depend on how they are divided.
        square = torch.linalg.vector_norm(gradients * self.counted, dtype=torch.float64).square()
        self.norm = self._mesh.sum_(square, *sharers(self._summed)).sqrt().float()
        scale = (self._limit / (self.norm + _TINY)).clamp(max=1.0)
        gradients.mul_(scale.where(self.norm.isfinite(), math.nan))
