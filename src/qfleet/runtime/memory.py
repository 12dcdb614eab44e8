"""The shared-memory folder of a run: files mapped into several processes, gone when their owner is.

A file under the system's shared-memory folder is used instead of `multiprocessing.shared_memory`, which Python 3.11
unlinks when any attached process exits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import signal
from pathlib import Path

import numpy as np

from qfleet.core.errors import QfleetError
from qfleet.core.shared_memory import REMEDY, TOO_SMALL, free_shared_memory, shared_memory_root
from qfleet.runtime.framing import Buffer, Frame, Sealed
from qfleet.runtime.held_back import held_back


class NoRoom(QfleetError):
    """The shared-memory folder cannot hold a file; sizes in bytes."""

    def __init__(self, needed: int, free: int, root: Path) -> None:
        self._needed, self._free, self._root = needed, free, root
        super().__init__(self.told("a file", ""))

    def told(self, what: str, setting: str) -> str:
        """Return the message for the person who can change the setting."""
        remedy = f", or lower {setting}" if setting else ""
        return (
            f"{TOO_SMALL}: {what} takes {self._needed / 1e6:.1f} MB and {self._free / 1e6:.1f} MB are "
            f"free in {self._root}; {REMEDY}{remedy}"
        )


class RunFolder:
    """The shared-memory folder of one run; belongs to this process for as long as its lock is held."""

    def __init__(self, root: Path | None = None) -> None:
        root = root or shared_memory_root()
        remove_leftovers(root)
        name = f"qfleet-{os.getpid()}-{secrets.token_hex(4)}"
        hidden = root / f".{name}"
        with held_back() as held:
            hidden.mkdir(mode=0o700)
            self._lock = os.open(hidden / "owner", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path = hidden.rename(root / name)  # visible to others only when locked
        try:
            held.deliver()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Delete the folder and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def free_bytes() -> int:
    """Return how much fits the shared-memory folder, once the leftovers of dead runs are removed."""
    remove_leftovers(shared_memory_root())
    return free_shared_memory()


def remove_leftovers(root: Path) -> list[Path]:
    """Delete the folders of runs whose owner is dead, and end what still uses them; returns the folders.

    The owner's lock says whether it lives: the kernel drops it on any death, and unlike a process number it is never
    reused and means the same in every container.
    """
    removed = []
    for folder in root.glob("qfleet-*"):
        try:
            lock = os.open(folder / "owner", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or being removed right now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _kill_users(folder)  # before that: the folder is what tells them
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
    return removed


def _kill_users(folder: Path) -> None:
    """Kill every process that has a file of the folder mapped, and what it has started, where the system tells (Linux).

    A role ends by itself when its owner is gone, unless it was stopped meanwhile, by Ctrl-Z or a debugger.
    """
    mark = os.fsencode(f"{folder.resolve()}/")
    for maps in Path("/proc").glob("[1-9]*/maps"):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            pid = int(maps.parent.name)
            if pid != os.getpid() and mark in maps.read_bytes():
                # Each role leads a process group, with what it has started.
                kill = os.killpg if os.getpgid(pid) == pid else os.kill
                kill(pid, signal.SIGKILL)


def create(path: Path, nbytes: int) -> Buffer:
    """Map a new file; its memory is reserved now: a full folder would later be a bus error, not an exception."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    except OSError as error:
        os.ftruncate(descriptor, 0)  # some systems keep what was reserved before the room ended
        path.unlink()
        if error.errno != errno.ENOSPC:
            raise
        raise NoRoom(nbytes, shutil.disk_usage(path.parent).free, path.parent.parent) from error
    finally:
        os.close(descriptor)


def attach(path: Path) -> Buffer:
    """Map an existing file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
    finally:
        os.close(descriptor)


class SlotWriter:
    """Writes frames into one slot, a file that is made anew under the next generation when a frame outgrows it.

    `generation` is that of the file which a former writer left, 0 if there was none.
    """

    def __init__(self, stem: Path, generation: int = 0) -> None:
        self._stem = stem
        self.generation = generation
        self._buffer: Buffer = np.empty(0, np.uint8)
        if generation:
            with contextlib.suppress(FileNotFoundError):  # a writer that died while it replaced the file
                self._buffer = attach(_generation_path(stem, generation))

    def write(self, frame: Frame | Sealed) -> Buffer:
        """Write a frame; returns the bytes as they lie in the slot."""
        if frame.nbytes > self._buffer.size:
            old, new = (_generation_path(self._stem, self.generation + more) for more in (0, 1))
            new.unlink(missing_ok=True)  # of a writer that died before it told anybody of it
            self._buffer = create(new, _roomy(frame.nbytes))
            self.generation += 1
            old.unlink(missing_ok=True)
        written = self._buffer[: frame.nbytes]
        frame.write(written)
        return written


class SlotReader:
    """Finds frames in one slot."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._generation = 0
        self._buffer: Buffer = np.empty(0, np.uint8)

    def view(self, generation: int, nbytes: int) -> Buffer:
        """Return the frame that was written there, as it lies in the slot."""
        if generation != self._generation:
            self._buffer = attach(_generation_path(self._stem, generation))
            self._generation = generation
        return self._buffer[:nbytes]


def _generation_path(stem: Path, generation: int) -> Path:
    return stem.with_name(f"{stem.name}.{generation}")


def _roomy(nbytes: int) -> int:
    """Return a file size with a quarter to spare, in whole pages."""
    return -(-nbytes * 5 // (4 * mmap.PAGESIZE)) * mmap.PAGESIZE
