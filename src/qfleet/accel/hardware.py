"""What a device is, and what of torch.compile, our kernels and CUDA graphs cannot be used on it, and why."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qfleet.core.optional import import_problem

ROUNDED = (8, 0)
"""Compute capability from which GPUs multiply in tf32 and bf16."""
UNTESTED = ("ROCm", "MPS", "XPU")
"""Devices that take the device-agnostic code, on which nobody ran it yet."""


@dataclass(frozen=True)
class Hardware:
    """One device of this machine, as far as choices depend on it."""

    kind: str
    """cpu, cuda (NVIDIA), or another device type; AMD's GPUs, which torch calls cuda, are rocm."""
    name: str
    capability: tuple[int, int] = (0, 0)
    """NVIDIA's number for the generation of a GPU."""
    obstacles: Mapping[str, str] = field(default_factory=dict)
    """Settings that cannot be used here, each with the reason."""


def look(device: torch.device) -> Hardware:
    """Return what a device is. It must be usable."""
    if device.type == "cpu":
        obstacles = {"precision": "tf32 and fp16 are for GPUs", "graphs": "they are for NVIDIA GPUs"}
        if not has_compiler("CXX", ("g++", "clang++")):
            obstacles["compile"] = "no C++ compiler found"
        return Hardware("cpu", cpu_name(), obstacles=obstacles)
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        return Hardware("cuda", torch.cuda.get_device_name(device), capability, cuda_obstacles(capability))
    kind = "rocm" if device.type == "cuda" else device.type
    only = dict.fromkeys(("kernels", "graphs"), "they are for NVIDIA GPUs")
    return Hardware(kind, torch.cuda.get_device_name(device) if kind == "rocm" else kind, obstacles=only)


def why_no_device(kind: str) -> str:
    """Return why torch has no device of this kind (cuda, mps or xpu) here; empty if there is one."""
    if kind == "cuda":
        return "" if torch.cuda.is_available() else f"torch sees no CUDA device here ({why_no_cuda()})"
    available = torch.backends.mps.is_available() if kind == "mps" else torch.xpu.is_available()
    return "" if available else f"torch sees no {kind.upper()} device here"


def why_no_cuda() -> str:
    """Return why torch has no CUDA device here, in its own words where it has some; empty if there is one."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0]
    return "torch is built with CUDA but sees no device (CUDA_VISIBLE_DEVICES may be empty)"


def cuda_obstacles(capability: tuple[int, int]) -> dict[str, str]:
    """Return what cannot be used on an NVIDIA GPU of this generation with what is installed here."""
    obstacles = {}
    if capability < ROUNDED:
        obstacles["precision"] = "tf32 and bf16 need compute capability 8.0"
    if missing := _why_no_triton():
        obstacles |= {"kernels": missing, "compile": missing}
    return obstacles


def _why_no_triton() -> str:
    """Return what keeps Triton from being used here; empty if nothing does."""
    if problem := import_problem("triton"):
        return f"Triton {problem}"
    return "" if has_compiler("CC", ("gcc", "clang")) else "no C compiler found, which Triton needs"


def has_compiler(variable: str, names: Iterable[str]) -> bool:
    """Return whether the environment variable names a compiler that exists, or one of `names` is on the path."""
    given = os.environ.get(variable)
    return any(shutil.which(name) is not None for name in ([given.split()[0]] if given and given.strip() else names))


def cpu_name() -> str:
    """Return the processor's model and how many of its cores there are; homes may be shared by several machines."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else model}, {os.cpu_count()} cores"
