"""Epochs of a run: each start or resume has a folder of its own, through which all that it saves must go.

Whoever takes a run over makes the folder of the next number and then moves the former one away. A checkpoint appears by
being moved out of its writer's folder, and an old one goes by being moved in. A writer whose folder is gone can do
neither, however long it was stopped or cut off, and at whatever moment: a lock alone does not see to that on a disk
that several machines share.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from qfleet.core.errors import Superseded

_FOLDER = ".epoch-"
_OWNER = "owner"
_LEAVING = "leaving-"
"""How the names of those begin that are to be removed."""


@dataclass(frozen=True)
class Epoch:
    """The right to write below `root`, until somebody begins a later one."""

    root: Path
    name: str
    """Its number and something that no other has, since two may begin at once; the greater one then wins."""

    @classmethod
    def begin(cls, root: Path) -> Epoch:
        """Take over whatever lies below `root`; former epochs end."""
        root.mkdir(parents=True, exist_ok=True)
        last = max(_epochs(root), key=_by_name, default=None)
        epoch = cls(root, f"{1 if last is None else last.number + 1:06d}-{uuid.uuid4().hex[:8]}")
        epoch.folder.mkdir()
        epoch._sign()
        for former in _epochs(root):
            if former.name < epoch.name:
                epoch.discard(former.folder)
        return epoch

    @property
    def number(self) -> int:
        """How often the run was begun or resumed by now."""
        return int(self.name[:6])

    @property
    def folder(self) -> Path:
        """Where this epoch prepares what it will publish, and keeps what ends with it."""
        return self.root / f"{_FOLDER}{self.name}"

    def require(self) -> None:
        """Raise Superseded if a later epoch has begun; a folder that a person deleted is made anew."""
        last = max(_epochs(self.root), key=_by_name, default=None)
        if last is not None and last.name > self.name:
            raise Superseded(
                f"{self.root.parent}: the run was taken over by {_signature(last)}, while this process, {_me()}, was"
                " stopped or cut off; it ends here, and what it did since then is dropped"
            )
        if last is None:
            self.folder.mkdir(parents=True)
            self._sign()

    def discard(self, path: Path) -> None:
        """Remove a file or a folder below `root`: in one step, and only if this epoch has not ended."""
        leaving = self.folder / f"{_LEAVING}{path.name}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, leaving)
        _remove(leaving)

    def sweep(self) -> list[str]:
        """Try again to remove what could not be removed before; returns the names of what stays."""
        for path in self.folder.glob(f"{_LEAVING}*"):
            _remove(path)
        return sorted(path.name.removeprefix(_LEAVING) for path in self.folder.glob(f"{_LEAVING}*"))

    def _sign(self) -> None:
        (self.folder / _OWNER).write_text(f"{_me()}, at {time.strftime('%Y-%m-%d %H:%M:%S')}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def is_folder(path: Path) -> bool:
    """Return whether a path is that of an epoch's folder."""
    return path.name.startswith(_FOLDER)


def _epochs(root: Path) -> list[Epoch]:
    return [Epoch(root, path.name.removeprefix(_FOLDER)) for path in root.glob(f"{_FOLDER}{'[0-9]' * 6}-*")]


def _by_name(epoch: Epoch) -> str:
    return epoch.name


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _signature(epoch: Epoch) -> str:
    try:
        return (epoch.folder / _OWNER).read_text() or "another process"
    except OSError:
        return "another process"
