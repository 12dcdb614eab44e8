"""Chooses how a device's replay is computed: by our own kernels where they can run, else by torch's operations."""

from __future__ import annotations

import torch

from qfleet.accel.kernels.launch import available
from qfleet.replay.grid import Grid
from qfleet.replay.samplers import PrioritisedConfig, UniformConfig


def grid_type(sampler: UniformConfig | PrioritisedConfig, device: torch.device, kernels: bool) -> type[Grid]:
    """Return the class of grid to make; `kernels` allows ours, which only priorities need."""
    if kernels and isinstance(sampler, PrioritisedConfig) and device.type == "cuda" and available():
        from qfleet.accel.kernel_grid import KernelGrid

        return KernelGrid
    return Grid
