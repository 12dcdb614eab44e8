"""What of this machine a run may use: cores, memory, shared memory, and GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator

from qfleet.accel.hardware import cpu_name
from qfleet.core.config import Config
from qfleet.core.shared_memory import free_shared_memory
from qfleet.replay.memory import available_memory

_QUOTAS = (
    (Path("/sys/fs/cgroup/cpu.max"), None),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)
"""Where Linux keeps a container's share of processor time: quota and period in one file, or in two."""


class Gpu(Config):
    """One GPU of this machine."""

    name: str
    memory: int = Field(ge=0)
    """Bytes of it, whoever has them now; 0 where nobody looked."""


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
    gpus: tuple[Gpu, ...] = ()
    """The GPUs that torch sees, by their numbers."""

    @property
    def gpu(self) -> str:
        """The name of the first GPU, on which things are measured; empty without one."""
        return self.gpus[0].name if self.gpus else ""

    @model_validator(mode="before")
    @classmethod
    def _of_one_gpu(cls, tree: Any) -> Any:
        """Read plans, which runs go on with, from when only the first GPU's name was kept."""
        if not isinstance(tree, dict) or "gpu" not in tree:
            return tree
        others = {name: value for name, value in tree.items() if name != "gpu"}
        return {**others, "gpus": [{"name": tree["gpu"], "memory": 0}] if tree["gpu"] else []}


def look() -> Resources:
    """Return what this machine has now."""
    return Resources(
        cpu=cpu_name(),
        cores=usable_cores(),
        memory=available_memory(),
        shared_memory=free_shared_memory(),
        gpus=_gpus(),
    )


def _gpus() -> tuple[Gpu, ...]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(number) for number in range(count)]
    return tuple(Gpu(name=one.name, memory=one.total_memory) for one in found)


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
