"""A group of learner ranks that sum their gradients: torch's gloo and NCCL, beside any group the user has."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous as meet

from qfleet.core.errors import ConfigError
from qfleet.core.failpoints import failpoint
from qfleet.core.versions import versions
from qfleet.parallel.devices import NAME_BYTES, all_have_their_own, device_name
from qfleet.parallel.group import Group

LOOPBACK, _FILE, _STORE = "127.0.0.1", "file://", "store://"
_COMPARED, _LONGEST = ("qfleet", "torch", "numpy"), 200
"""Packages that decide about a gradient's bits, and bytes that their versions take at most."""
_GLOOS_OWN = re.compile(r"^\[[^]]*\] |\. This is typically caused.*", re.DOTALL)
"""What gloo adds to an error that is of no use to a person here: where in its code it was, and general advice."""


class GradientGroup(Group):
    """One rank of a group whose ranks are processes, each perhaps on a machine of its own.

    `rendezvous` is where the ranks meet: `file:///path` (one machine, a file that does not exist yet), `tcp://host:port`
    of rank 0, or `store://host:port/name`, a name in a store of torch's that nobody has met under. A rank waits at most
    `timeout_s` seconds for the others, there and in each collective. Where every rank's `device` is a GPU of its own,
    tensors on it go by NCCL; all others go by gloo.
    """

    def __init__(self, rank: int, size: int, rendezvous: str, timeout_s: float, device: str = "cpu") -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of a group of {size}")
        self.rank, self.size = rank, size
        self._nccl: Any = None
        timeout = timedelta(seconds=timeout_s)
        with self._explained(f"meeting at {rendezvous}"):
            self._store = meeting_store(rendezvous, rank, size, timeout)
            gloo: Any = distributed.ProcessGroupGloo  # torch's own stubs leave out most of it
            options = gloo._Options()
            own = own_address(rendezvous)
            options._devices = [gloo.create_device(hostname=own) if own else gloo.create_default_device()]
            options._timeout = timeout
            self._group = gloo(self._store, rank, size, options)
        self._require_same_versions()
        names = self._told(device_name(torch.device(device)), NAME_BYTES)
        if all_have_their_own(names):
            with self._explained("joining by NCCL"):
                if own and own != LOOPBACK and (name := interface(own)):
                    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
                self._nccl = join_by_nccl(self._store, rank, size, timeout)

    @property
    def transport(self) -> str:
        """By what gradients are summed."""
        return "gloo" if self._nccl is None else "NCCL"

    def _carrier(self, tensor: torch.Tensor) -> Any:
        """Return torch's group for a tensor, by where that is."""
        return self._nccl if self._nccl is not None and tensor.is_cuda else self._group

    def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to replace a contiguous tensor by its sum over all ranks; return what waits for the end of it."""
        with self._explained("all-reduce"):
            work = self._carrier(tensor).allreduce([tensor])

        def end() -> None:
            failpoint("group.sum")
            with self._explained("all-reduce"):
                work.wait()

        return end

    def share(self, data: bytes) -> bytes:
        """Return what rank 0 gave, on every rank."""
        size = torch.tensor([len(data) if self.rank == 0 else 0])
        self.all_reduce_(size)
        shared = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            shared.numpy()[:] = np.frombuffer(data, np.uint8)
        with self._explained("broadcast"):
            self._group.broadcast(shared, 0).wait()
        return shared.numpy().tobytes()

    def _require_same_versions(self) -> None:
        """Raise an error that names the ranks with other versions than rank 0's: they would not compute the same."""
        own = " ".join(f"{name} {version}" for name, version in versions().items() if name in _COMPARED)
        first, *rest = (told.rstrip(b"\0").decode() for told in self._told(own.encode(), _LONGEST))
        others = [f"rank {rank} has {found}" for rank, found in enumerate(rest, 1) if found != first]
        if others:
            raise ConfigError(
                f"learners need the same versions: rank 0 has {first}, {', '.join(others)}."
                " Install one set of versions on all machines (requirements.lock names one)"
            )

    def _told(self, words: bytes, length: int) -> list[bytes]:
        """Return what every rank says, in so many bytes."""
        room = np.frombuffer(words.ljust(length, b"\0"), np.uint8).copy()
        return [bytes(one.numpy()) for one in self.all_gather(torch.from_numpy(room))]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous tensors of all ranks, which have one shape, in the order of ranks."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._explained("all-gather"):
            self._carrier(tensor).allgather([gathered], [tensor]).wait()
        return gathered

    def close(self) -> None:
        """Leave the group; the others fail at their next collective."""
        self._group.abort()
        if self._nccl is not None:
            self._nccl.abort()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            who, why = f"rank {self.rank} of {self.size}", _GLOOS_OWN.sub("", str(error))
            raise ConnectionError(f"{who}: {what} failed, another rank may be gone: {why}") from error


def meeting_store(rendezvous: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Return torch's store at the place where ranks meet; who asks it for something waits so long at most."""
    if rendezvous.startswith(_FILE):
        # Torch's own reading of an address would end the path at a '#' or '?'.
        store: Any = distributed.FileStore(rendezvous.removeprefix(_FILE), size)  # type: ignore[attr-defined]
    elif rendezvous.startswith(_STORE):
        client = distributed.TCPStore(*_reached(rendezvous), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        store = distributed.PrefixStore(rendezvous.rpartition("/")[2], client)  # type: ignore[attr-defined]
    else:
        store, _, _ = next(meet(rendezvous, rank, size, timeout=timeout))
    store.set_timeout(timeout)
    return store


def join_by_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return torch's NCCL group of ranks that have met at a store, each with a GPU of its own."""
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    own_keys = distributed.PrefixStore("nccl", store)  # type: ignore[attr-defined]
    return nccl(own_keys, rank, size, options)


def local(rendezvous: str) -> bool:
    """Return whether all ranks are on one machine: loopback needs no host name that resolves."""
    return rendezvous.startswith((_FILE, f"tcp://{LOOPBACK}:", "tcp://localhost:", f"{_STORE}{LOOPBACK}:"))


def own_address(rendezvous: str) -> str:
    """Return the address at which a rank listens for the others; empty where torch shall choose one.

    That is the one by which this machine reaches the store where they meet, and no other.
    """
    if local(rendezvous):
        return LOOPBACK
    if not rendezvous.startswith(_STORE):
        return ""
    host, port = _reached(rendezvous)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:  # nothing is sent
        asking.connect((host, port))
        return str(asking.getsockname()[0])


def interface(address: str) -> str:
    """Return the name of this machine's interface that has an address; empty if there is none."""
    found = (name for name, own in psutil.net_if_addrs().items() if any(one.address == address for one in own))
    return next(found, "")


def _reached(rendezvous: str) -> tuple[str, int]:
    """Return host and port of a store."""
    host, _, port = rendezvous.removeprefix(_STORE).rpartition("/")[0].rpartition(":")
    return host, int(port)
