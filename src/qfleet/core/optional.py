"""Whether an optional library can be used: installed is not enough, it must also load."""

from __future__ import annotations

import importlib
import importlib.util


def import_problem(module: str) -> str:
    """Return what keeps a module from being imported, to follow its name in a sentence; empty if nothing does."""
    if importlib.util.find_spec(module) is None:
        return "is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # a Python or NumPy that it does not know, a library that does not load
        return f"cannot be imported ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    return ""
