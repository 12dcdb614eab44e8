"""Which device a learner rank has for itself, and whether all ranks of a group have different ones."""

from __future__ import annotations

import hashlib
import socket

import torch

NAME_BYTES = 32
"""Bytes of a device's name."""
_NONE = bytes(NAME_BYTES)


def own_device(device: str, rank: int) -> str:
    """Return a rank's device, and make it that of its process: GPUs are dealt out in turn."""
    if torch.device(device).type != "cuda" or not torch.cuda.device_count():
        return device
    own = rank % torch.cuda.device_count()
    torch.cuda.set_device(own)  # kernels of our own, and what libraries allocate, go where the process is
    return f"cuda:{own}"


def device_name(device: torch.device) -> bytes:
    """Return what tells a GPU from all others, on this machine and on others; zeros for what is no GPU."""
    if device.type != "cuda":
        return _NONE
    uuid = torch.cuda.get_device_properties(device).uuid
    return hashlib.sha256(f"{socket.gethostname()} {uuid}".encode()).digest()


def all_have_their_own(names: list[bytes]) -> bool:
    """Return whether every rank, by the name of its device, has a GPU that no other has: NCCL wants that."""
    return _NONE not in names and len(set(names)) == len(names)
