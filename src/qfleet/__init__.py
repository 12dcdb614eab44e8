"""Deep Q-learning on any hardware you have, as fast as it allows.

The stable names are `train`, `resume`, `evaluate`, `load`, `plan`, `Run`, `Callbacks` and `Experiment`; each is
imported when it is first used, so that `import qfleet` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qfleet.version import __version__

if TYPE_CHECKING:
    from qfleet.api import Run, evaluate, fetch, load, plan, resume, train
    from qfleet.control.monitor import Callbacks
    from qfleet.experiment import Experiment

_HOMES = {
    "train": "qfleet.api",
    "resume": "qfleet.api",
    "evaluate": "qfleet.api",
    "fetch": "qfleet.api",
    "load": "qfleet.api",
    "plan": "qfleet.api",
    "Run": "qfleet.api",
    "Callbacks": "qfleet.control.monitor",
    "Experiment": "qfleet.experiment",
}

__all__ = ["Callbacks", "Experiment", "Run", "__version__", "evaluate", "fetch", "load", "plan", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'qfleet' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
