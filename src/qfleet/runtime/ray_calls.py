"""Calls of Ray actors whose answers must come: one that is lost on its way is made again."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, GetTimeoutError, RayError, RayTaskError

DEAD = (ActorDiedError, ActorUnschedulableError)
"""What Ray says of an actor that nobody will ever reach: it has died, or its node takes no more, or none has room."""
AGAIN_S = 0.1
"""How long a call waits before it is made again."""


def insist(method: Any, *arguments: Any, patience_s: float | None = None) -> Any:
    """Return the answer of an actor's method, calling it until one comes; it must bear to be called twice.

    Raises one of DEAD when there is nobody to ask, RayTaskError for what the method raised, and GetTimeoutError when
    there is no answer within `patience_s` seconds.
    """
    until = None if patience_s is None else time.monotonic() + patience_s
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        try:
            return ray.get(method.remote(*arguments), timeout=left)
        except (*DEAD, RayTaskError, GetTimeoutError):
            raise
        except RayError:  # the call or its answer was lost
            time.sleep(AGAIN_S)
