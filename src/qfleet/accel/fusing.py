"""Functions fused by torch's compiler, which meanwhile reads what it needs to know of itself."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R], whole: bool = False) -> Callable[P, R]:
    """Return a function compiled at its first call, for the shapes it is then given; `whole` refuses to do so in parts.

    Compiled code is kept on disk, and found again by later processes.
    """
    _identify_early()
    compiled: Callable[P, R] = torch.compile(function, dynamic=False, fullgraph=whole)
    return compiled


@functools.cache
def _identify_early() -> None:
    """Let a thread find the names that compiled code is kept under: half a second, of which most is not Python's."""
    threading.Thread(target=_identify, name="compiler", daemon=True).start()


def _identify() -> None:
    with contextlib.suppress(Exception):  # these are torch's own affairs: where they changed, it does this itself later
        from torch._inductor.codecache import CacheBase, torch_key

        CacheBase.get_system()
        torch_key()
