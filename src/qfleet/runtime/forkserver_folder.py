"""Imported by a forkserver: removes multiprocessing's temporary folder for an owner that was killed.

The folder has the socket by which children are asked for, and whatever else its owner has there. The owner removes it
at its end, but not when it is killed; the forkserver notices that death, and ends, too.
"""

from __future__ import annotations

import atexit
import os
import shutil
import time

NAMED_BY = "QFLEET_FORKSERVER_FOLDER"
"""The variable by which a forkserver is told its owner's number and the folder, as 123:/tmp/folder."""
_DYING_S = 2.0
"""How long an owner may take from the closing of its files, which the forkserver notices, to its end."""


def _remove(folder: str, owner: int) -> None:
    """Remove the folder, unless its owner still lives and will do so itself."""
    until = time.monotonic() + _DYING_S
    while os.getppid() == owner:
        if time.monotonic() > until:
            return
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


if named := os.environ.pop(NAMED_BY, ""):
    _owner, _, _folder = named.partition(":")
    atexit.register(_remove, _folder, int(_owner))  # children of a forkserver end without such calls
