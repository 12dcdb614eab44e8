"""The user's own classes: handed over in Python, never named in a file that qfleet would import them from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UserCode:
    """What a user passes to `train` or `load` beside settings."""

    network: Callable[..., Any] | None = None
    """A torch module class used as the network's torso; see docs/custom.md."""
    env: Callable[[], Any] | None = None
    """A function that makes one Gymnasium environment."""
