"""Chooses how a device's replay is computed: by our own kernels where they can run, else by torch's operations."""

from __future__ import annotations

import torch

from qfleet.accel.kernels.launch import available
from qfleet.core.spec import EnvSpec
from qfleet.replay.grid import Grid
from qfleet.replay.samplers import PrioritisedConfig, UniformConfig


def make_grid(
    spec: EnvSpec,
    length: int,
    envs: int,
    n_step: int,
    gamma: float,
    sampler: UniformConfig | PrioritisedConfig,
    device: torch.device,
    generator: torch.Generator,
    kernels: bool,
) -> Grid:
    """Return an empty grid of `length` ticks of E environments; `kernels` allows ours, which only priorities need."""
    if kernels and isinstance(sampler, PrioritisedConfig) and device.type == "cuda" and available():
        from qfleet.accel.kernel_grid import KernelGrid

        return KernelGrid(spec, length, envs, n_step, gamma, sampler, device, generator)
    return Grid(spec, length, envs, n_step, gamma, sampler, device, generator)
