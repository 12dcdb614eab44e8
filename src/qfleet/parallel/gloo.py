"""Gloo as the groups of a mesh need it: with one thread each, since two of them spoil the process's memory.

Each thread of torch's `ProcessGroupGloo` notes the name of the collective it has ended in one string of the group, and
takes no lock. Names of up to 15 letters lie in the string itself; longer ones ("ALLGATHER_COALESCED", which joins the
parts of a DTensor) lie in memory that one thread may free while the other writes into it. glibc then ends the process:
"malloc(): unaligned tcache chunk detected".
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch import distributed

INTERFACES = "GLOO_SOCKET_IFNAME"
"""The variable that names the interfaces by which ranks talk, divided by commas."""
_NAME = "qfleet_gloo"


def one_thread_gloo() -> str:
    """Return the name by which torch makes groups of gloo on CPUs that have one thread each."""
    if _NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(_NAME, _group, devices=["cpu"])
    return _NAME


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return this process's rank of a group, as torch would make it but for the number of threads."""
    gloo: Any = distributed.ProcessGroupGloo  # torch's own stubs leave out most of it
    names = os.environ.get(INTERFACES)
    options = gloo._Options()
    options._devices = (
        [gloo.create_device(interface=name) for name in names.split(",")] if names else [gloo.create_default_device()]
    )
    options._timeout, options._threads = timeout, 1
    return gloo(store, rank, size, options)
