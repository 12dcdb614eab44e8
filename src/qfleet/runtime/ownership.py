"""Who is using a run's directory: a lock that dies with its owner, a record that names them, and signs of life.

On one machine the lock says for certain whether the owner lives. Some shared disks do not carry locks from machine to
machine; there the signs of life decide, which are the modification time of the lock's file. Clocks differ and jump, so
that an old time, or one that is yet to come, proves no death: before a directory is taken it is watched for new signs.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError

LOCK, REQUEST, SCALE = ".lock", ".request", ".scale"
INTERRUPTED = "interrupted"
"""The ending of an owner that was told to end at once."""
BEAT_S = 1.0
"""Seconds between two signs of life, and between two looks for a request to end the run."""
SILENT_S = 60.0
"""An owner on another machine, whose lock cannot be seen, is taken for dead when it was silent for so long."""
_WATCHED_BEATS = 3
"""So many signs of life must fail to come before a silent owner on another machine loses its directory."""
_WISH = ".json"
"""How the names of requests for other numbers end in their folder: the time, so that they sort by it, and an id."""
_WISH_BYTES, _WISHES = 1024, 64
"""How long such a request may be, and how many are read at a time."""
_PATIENCE_S = 0.3
"""How long a lock is tried: whoever looks at a run holds it for a moment."""


@dataclass(frozen=True)
class Owner:
    """The process that uses a run's directory, or used it last. Times are Unix times."""

    user: str
    host: str
    pid: int
    since: float
    until: float | None = None
    """When it gave the directory back; None as long as it did not."""
    ending: str = ""
    """What it ended with, if that was an error."""

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (process {self.pid}, since {clock(self.since)})"


@dataclass(frozen=True)
class Sight:
    """What can be seen of a directory's owner from this machine."""

    owner: Owner | None
    locked: bool | None
    """Whether somebody holds the lock; None where the disk has no locks."""
    silent_s: float
    """Seconds since the last sign of life, by this machine's clock."""

    @property
    def alive(self) -> bool:
        """Whether somebody is using the directory, as far as that can be told from here."""
        return bool(self.locked) or (self.beyond_locks and abs(self.silent_s) < SILENT_S)

    @property
    def beyond_locks(self) -> bool:
        """Whether there is an owner who has not given the directory back and whose lock could not be seen here."""
        if self.locked or self.owner is None or self.owner.until is not None:
            return False
        return self.locked is None or self.owner.host != socket.gethostname()

    @property
    def doubt(self) -> str:
        """What a person should know of how `alive` was told; empty where it is certain."""
        silence = f"no sign of life for {self.silent_s:.0f} s"
        if self.locked and self.silent_s >= SILENT_S:
            return f"{silence} although its lock is held: its driver is suspended or hangs, or clocks differ"
        if self.locked or self.owner is None or self.owner.until is not None:
            return ""
        if self.alive:
            return f"its lock cannot be seen from here; last sign of life {max(0.0, self.silent_s):.0f} s ago"
        return "" if self.owner.host == socket.gethostname() else f"{silence}; only {self.owner.host} knows for certain"


def look(directory: Path) -> Sight:
    """Return what can be seen of a directory's owner; changes nothing."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY)
    except OSError:
        return Sight(None, False, float("inf"))
    try:
        return Sight(_read(descriptor), _taken(descriptor, fcntl.LOCK_SH), _silence(descriptor))
    finally:
        os.close(descriptor)


def refusal(directory: Path, sight: Sight) -> ConfigError:
    """Return the error for whoever wants to use a directory that somebody is using."""
    remedy = f"wait for it, stop it with `qfleet stop {directory}`, or choose another --run-dir"
    if not sight.locked:
        remedy += f" ({sight.doubt}: if it is gone for good, the directory is free after {SILENT_S:.0f} s of silence)"
    return ConfigError(f"{directory} is in use by {sight.owner or 'an unknown process'}; {remedy}")


def request_end(directory: Path) -> None:
    """Ask the owner of a directory to end its run, from any machine that shares the disk."""
    try:
        (directory / REQUEST).write_text(f"{_user()}@{socket.gethostname()}\n")
    except OSError as error:
        raise ConfigError(
            f"{directory / REQUEST} cannot be written ({error.strerror}), and so its owner cannot be asked to end it"
        ) from error


def request_scale(
    directory: Path, actors: int | None = None, learners: int | None = None, shards: int | None = None
) -> str:
    """Ask the owner of a directory for other numbers of actors, learners or shards; returns the request's id.

    Each request is a file of its own, which the owner removes when it has heard it.
    """
    request = {"id": uuid.uuid4().hex, "by": f"{_user()}@{socket.gethostname()}"}
    line = json.dumps({**request, "actors": actors, "learners": learners, "shards": shards}) + "\n"
    place = directory / SCALE / f"{time.time_ns():020d}-{request['id']}{_WISH}"
    partial = place.with_suffix(".partial")
    try:
        partial.write_text(line)
        os.replace(partial, place)  # the owner sees all of it or nothing
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise ConfigError(
            f"{directory / SCALE} cannot be written ({error.strerror}), and so its owner cannot be asked to scale it"
        ) from error
    return request["id"]


def clock(time_s: float) -> str:
    """Return a Unix time as this machine's date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


@dataclass
class Ownership:
    """The hold on a directory; made by `acquire`, ended by `release` or `forgo`."""

    directory: Path
    owner: Owner
    asked: Callable[[str], bool]
    """Called in another thread with who asks for the run's end, once a second until it says that it has heard."""
    wished: Callable[[dict[str, Any]], bool]
    """Called in another thread with each request for other numbers of roles, in their order, once a second until it
    says that it has heard."""
    _descriptor: int
    _answered_ns: int
    """When the last request for an end was made that was heard, or meant for somebody before."""
    _former: Owner | None = None
    """Who had it before."""
    _stirred_ns: int = 0
    """When that one last gave a sign of life."""
    _heard: set[str] = field(default_factory=set)
    """The names of requests that were heard: who may read a file may not always remove it."""
    _over: threading.Event = field(default_factory=threading.Event)
    _beats: threading.Thread | None = None

    @classmethod
    def acquire(
        cls,
        directory: Path,
        asked: Callable[[str], bool],
        wished: Callable[[dict[str, Any]], bool] = lambda wish: False,
    ) -> Ownership:
        """Take a directory; refuses one that somebody else is using, and takes over that of the dead."""
        try:
            descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"run directory {directory} cannot be written: {error.strerror}") from error
        stale_ns = _made_ns(directory / REQUEST)  # before the lock: who sees that may ask for the run's end at once
        sight = Sight(_read(descriptor), _taken(descriptor, fcntl.LOCK_EX), _silence(descriptor))
        if sight.alive or (sight.beyond_locks and _stirs(directory)):
            os.close(descriptor)
            raise refusal(directory, sight)
        owner = Owner(_user(), socket.gethostname(), os.getpid(), time.time())
        stirred_ns = os.fstat(descriptor).st_mtime_ns
        ownership = cls(directory, owner, asked, wished, descriptor, stale_ns, sight.owner, stirred_ns)
        try:
            ownership._begin()
        except OSError:
            os.close(descriptor)
            raise
        return ownership

    def release(self, ending: str = "") -> None:
        """Give the directory back; `ending` is the error, if one ended the run."""
        self._give_back(replace(self.owner, until=time.time(), ending=ending))

    def forgo(self, ending: str) -> None:
        """Give the directory back as it was: what was to be done in it was refused before it began, with `ending`."""
        former = self._former or replace(self.owner, until=time.time(), ending=ending)
        self._give_back(former, None if self._former is None else self._stirred_ns)

    def _give_back(self, record: Owner, stirred_ns: int | None = None) -> None:
        self._over.set()
        if self._beats is not None:
            self._beats.join()
        with contextlib.suppress(OSError):  # a full disk: then the free lock says it
            _write(self._descriptor, record)
            if stirred_ns is not None:  # else the dead of another machine would seem to live for a while
                os.utime(self._descriptor, ns=(stirred_ns, stirred_ns))
        os.close(self._descriptor)  # the kernel gives the lock back, as it does when the process dies

    def _begin(self) -> None:
        _write(self._descriptor, self.owner)
        # Made now and filled later: of a file that is there, another machine's change is seen at once on NFS as well.
        (self.directory / REQUEST).open("a").close()
        _empty(self.directory / SCALE)
        self._beats = threading.Thread(target=self._beat, name="ownership", daemon=True)
        self._beats.start()

    def _beat(self) -> None:
        request = self.directory / REQUEST
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)
                made, by = _made_ns(request), request.read_text(errors="replace").strip()
                if made != self._answered_ns and by and self.asked(by):
                    self._answered_ns = made  # another one may follow, if this did not help
            with contextlib.suppress(OSError):
                self._pass_on()

    def _pass_on(self) -> None:
        """Tell of the requests for other numbers until one is not heard yet, and remove those that were."""
        folder = self.directory / SCALE
        os.utime(folder)  # a shared disk's server is asked for news thereby, not the list that is remembered here
        for place in _wishes(folder, self._heard):
            wish = _wish(place)
            if wish is not None and not self.wished(wish):
                return
            self._heard.add(place.name)
            with contextlib.suppress(OSError):
                place.unlink()


def _made_ns(file: Path) -> int:
    """Return when a file was written last; 0 if it is not there."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def interrupt_main_thread() -> bool:
    """Do what Ctrl-C does, from any thread; returns False where that may do nothing.

    So it is in what a shell began with &, and where a caller has a handler of its own, as asyncio has: who knows when
    that raises anything, and where.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler and not getattr(handler, "__module__", "").startswith("qfleet."):
        return False
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)
    return True


def _taken(descriptor: int, how: int) -> bool | None:
    """Try to lock a file; returns whether somebody else holds it, None where the disk has no locks."""
    until = time.monotonic() + (_PATIENCE_S if how == fcntl.LOCK_EX else 0.0)
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            if time.monotonic() >= until:
                return True
            time.sleep(0.02)
        except OSError:
            return None


def _read(descriptor: int) -> Owner | None:
    """Return the record in a lock's file; None if there is none, as in the files of older versions."""
    try:
        return Owner(**json.loads(os.pread(descriptor, 1 << 16, 0).partition(b"\n")[0]))
    except (ValueError, TypeError):
        return None


def _write(descriptor: int, owner: Owner) -> None:
    line = json.dumps(asdict(owner)).encode() + b"\n"
    os.pwrite(descriptor, line, 0)  # first, so that whoever reads meanwhile finds a whole line
    os.ftruncate(descriptor, len(line))


def _empty(folder: Path) -> None:
    """Make the folder of requests; those to an earlier owner are gone, and whoever made them knows that it ended."""
    if not folder.is_dir():
        folder.unlink(missing_ok=True)  # a file in earlier versions
    folder.mkdir(exist_ok=True)
    for place in folder.iterdir():
        with contextlib.suppress(OSError):
            place.unlink()


def _wishes(folder: Path, heard: Collection[str]) -> list[Path]:
    """Return the first of the requests in a folder, by time."""
    with os.scandir(folder) as entries:
        names = [one.name for one in entries if one.name.endswith(_WISH) and one.is_file(follow_symlinks=False)]
    return [folder / name for name in sorted(names) if name not in heard][:_WISHES]


def _wish(place: Path) -> dict[str, Any] | None:
    """Return the request in a file; None if it is none, since whoever may write the directory can write anything."""
    try:
        with place.open("rb") as file:
            content = file.read(_WISH_BYTES + 1)
        wish = json.loads(content) if len(content) <= _WISH_BYTES else None
    except (ValueError, RecursionError, PermissionError, FileNotFoundError):
        return None
    return wish if isinstance(wish, dict) else None


def _stirs(directory: Path) -> bool:
    """Watch for a sign of life, whatever its time says: the clock there, or the one here, may be hours wrong."""
    until, before = time.monotonic() + _WATCHED_BEATS * BEAT_S, _last_sign(directory)
    while time.monotonic() < until:
        time.sleep(BEAT_S / 4)
        if _last_sign(directory) != before:
            return True
    return False


def _last_sign(directory: Path) -> int:
    """Return the time of the last sign of life; opened anew, since a shared disk looks at its server only then."""
    descriptor = os.open(directory / LOCK, os.O_RDONLY)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _silence(descriptor: int) -> float:
    return time.time() - os.fstat(descriptor).st_mtime


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return str(os.getuid())
