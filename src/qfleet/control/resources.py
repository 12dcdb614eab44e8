"""What of this machine a run may use: cores, memory, shared memory, and the GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from pydantic import Field

from qfleet.accel.hardware import cpu_name
from qfleet.core.config import Config
from qfleet.core.shared_memory import free_shared_memory
from qfleet.replay.memory import available_memory

_QUOTAS = (
    (Path("/sys/fs/cgroup/cpu.max"), None),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)
"""Where Linux keeps a container's share of processor time: quota and period in one file, or in two."""


class Resources(Config):
    """What there is to share among the roles of a run."""

    cpu: str
    """The processor's model."""
    cores: float = Field(gt=0)
    """Cores that this process may keep busy; a container may allow parts of one."""
    memory: int = Field(ge=0)
    """Bytes of memory still free."""
    shared_memory: int = Field(ge=0)
    """Bytes still free where processes share memory; they count as memory too."""
    gpu: str = ""
    """The GPU's name; empty without one."""


def look() -> Resources:
    """Return what this machine has now."""
    return Resources(
        cpu=cpu_name(),
        cores=usable_cores(),
        memory=available_memory(),
        shared_memory=free_shared_memory(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    )


def usable_cores() -> float:
    """Return the cores that the scheduler lets this process use, no more than its container's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return min([cores, *(quota for files in _QUOTAS if (quota := _quota(*files)) is not None)])


def _quota(file: Path, period_file: Path | None) -> float | None:
    """Return the cores of a quota; None where there is no such file, or no limit in it."""
    try:
        quota, period = file.read_text().split() if period_file is None else (file.read_text(), period_file.read_text())
        cores = float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):  # no controller, or the word "max"
        return None
    return cores if cores > 0 else None
