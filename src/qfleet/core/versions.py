"""Which versions of what a process runs: written down with every run, and compared between learners."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from qfleet.version import __version__


def versions() -> dict[str, str]:
    """Return the versions of qfleet, Python and the packages that decide about numbers."""
    found = {"qfleet": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "gymnasium", "ale-py", "numba", "ray"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
