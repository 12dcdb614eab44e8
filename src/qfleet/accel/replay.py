"""Chooses how a device's replay is computed: by kernels or loops of our own where they can run, else by torch."""

from __future__ import annotations

import torch

from qfleet.accel.kernels.launch import available
from qfleet.replay.grid import Grid
from qfleet.replay.samplers import PrioritisedConfig, UniformConfig
from qfleet.replay.sumtree import use_numba


def grid_type(sampler: UniformConfig | PrioritisedConfig, device: torch.device, kernels: bool) -> type[Grid]:
    """Return the class of grid to make; `kernels` allows ours, which on a GPU only priorities need."""
    if kernels and device.type == "cpu" and use_numba():
        from qfleet.accel.cpu_grid import CompiledGrid

        return CompiledGrid
    if kernels and isinstance(sampler, PrioritisedConfig) and device.type == "cuda" and available():
        from qfleet.accel.kernel_grid import KernelGrid

        return KernelGrid
    return Grid
