"""Where the processes of a machine share memory, and what a person can do where that is too small."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from qfleet.core.errors import ConfigError

ELSEWHERE = "QFLEET_SHARED_MEMORY"
"""The variable that names another folder for shared memory; best one that lies in memory too."""
TOO_SMALL = "shared memory is too small"
REMEDY = f"make it larger (docker run --shm-size=...), name another folder by {ELSEWHERE}"
"""What helps whatever it is too small for."""
_USUAL = Path("/dev/shm")


def shared_memory_root() -> Path:
    """Return the folder that lies in memory, or the temporary folder where a system has none; or the one wished for."""
    if wished := os.environ.get(ELSEWHERE):
        if not (Path(wished).is_dir() and os.access(wished, os.W_OK | os.X_OK)):
            raise ConfigError(f"{ELSEWHERE} is '{wished}', which is not a folder that can be written to")
        return Path(wished)
    return _USUAL if _USUAL.is_dir() else Path(tempfile.gettempdir())


def free_shared_memory() -> int:
    """Return the bytes that are free there now."""
    return shutil.disk_usage(shared_memory_root()).free
