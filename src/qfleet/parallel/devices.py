"""Which GPU a role has: they are dealt out in turn, to learner ranks first, then to inference servers, from the other
end to the evaluator; and whether all ranks of a group have different ones."""

from __future__ import annotations

import hashlib
import socket

import torch

NAME_BYTES = 32
"""Bytes of a device's name."""
LAST = -1
"""The turn of the evaluator: no learner has the last GPU as long as there are more GPUs than learners."""
_NONE = bytes(NAME_BYTES)


def in_turn(turn: int, gpus: int) -> int:
    """Return which of so many GPUs a role has whose turn this is; that of a learner rank is its number."""
    return turn % gpus


def server_turn(index: int, learners: int) -> int:
    """Return the turn of an inference server beside so many learner ranks on GPUs: those that they leave come first."""
    return learners + index


def own_device(device: str, turn: int | None) -> str:
    """Return a role's device, and make it that of its process; without a turn it has the one that others have, too."""
    if turn is None or torch.device(device).type != "cuda" or not torch.cuda.device_count():
        return device
    own = in_turn(turn, torch.cuda.device_count())
    torch.cuda.set_device(own)  # kernels of our own, and what libraries allocate, go where the process is
    return f"cuda:{own}"


def sharers(device: str, ranks: int) -> int:
    """Return how many of so many ranks have the device of one of them, and its memory."""
    own = torch.device(device)
    if own.type != "cuda" or own.index is None:
        return ranks
    return len(range(own.index, ranks, torch.cuda.device_count()))


def gpu_memory(turn: int) -> int:
    """Return the bytes of memory of the GPU that a role has."""
    return int(torch.cuda.get_device_properties(in_turn(turn, torch.cuda.device_count())).total_memory)


def device_name(device: torch.device) -> bytes:
    """Return what tells a GPU from all others, on this machine and on others; zeros for what is no GPU."""
    if device.type != "cuda":
        return _NONE
    uuid = torch.cuda.get_device_properties(device).uuid
    return hashlib.sha256(f"{socket.gethostname()} {uuid}".encode()).digest()


def all_have_their_own(names: list[bytes]) -> bool:
    """Return whether every rank, by the name of its device, has a GPU that no other has: NCCL wants that."""
    return _NONE not in names and len(set(names)) == len(names)
