"""A small process that forks those of environments: clean, quick, and the end of them all when it is left alone.

It has no threads, so that forking it is safe, and has imported what environments need: a fresh interpreter for each
would cost seconds instead of a hundredth of one. An environment that dies takes nothing with it but what it started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from gymnasium.vector.utils import CloudpickleWrapper

from qfleet.core.errors import ConfigError
from qfleet.envs.loop import Environment
from qfleet.envs.slots import Slots
from qfleet.envs.spaces import Layout
from qfleet.envs.worker import Maker, hear, tell, work

_ORDER = struct.Struct("<cxxxii")
"""Kind, environment, and of a death how the process ended."""
_SPAWN, _END, _ENDED, _CLOSE = b"s", b"e", b"d", b"c"
_SETUP = b"u"
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from qfleet.envs.nursery import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)
_GRACE_S = 2.0
"""How long environments may take to close before they are killed."""
_PR_SET_PDEATHSIG = 1
KILLED = f"its process was killed by {signal.SIGKILL.name}"
"""How a process has ended that the system, or a person, ended."""


def payload(makers: Sequence[Maker], layout: Layout) -> bytes:
    """Return everything that a nursery has to know as bytes; refuses what cannot be sent to another process."""
    try:
        return pickle.dumps((layout, [pickle.dumps(CloudpickleWrapper(maker)) for maker in makers]))
    except Exception as error:
        raise ConfigError(
            f"{layout.spec.name} cannot be sent to another process ({type(error).__name__}: {error}): "
            "set env.vectorisation to 'sync', or make the environment in a function of an importable module"
        ) from error


class Nursery:
    """The actor's hold on that process."""

    def __init__(self, known: bytes, memory: int) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            arguments = [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno()), str(memory)]
            # One thread each: on few cores the thread pools of many environments would fight.
            threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            self._process = subprocess.Popen(
                arguments,
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
                env={**threads, **os.environ},
                process_group=0,  # a terminal's Ctrl-C is not meant for environments
            )
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `deaths` will tell
            tell(self._line, _SETUP, known)

    def fileno(self) -> int:
        """Return what becomes readable when `deaths` has something to tell."""
        return self._line.fileno()

    def spawn(self, index: int) -> socket.socket:
        """Begin the process of environment `index`, whose former one must have ended; returns its bell."""
        bell, theirs = socket.socketpair()
        with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `deaths` will tell
            socket.send_fds(self._line, [_ORDER.pack(_SPAWN, index, 0)], [theirs.fileno()])
        return bell

    def end(self, index: int) -> None:
        """Kill the process of environment `index`, if it lives; `deaths` will tell."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._line.send(_ORDER.pack(_END, index, 0))

    def deaths(self) -> list[tuple[int, str]] | None:
        """Return the environments whose process has ended, and how; None when the nursery itself is dead."""
        try:
            data = self._line.recv(_ORDER.size * 64, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        if not data:
            return None
        while len(data) % _ORDER.size:
            data += self._line.recv(_ORDER.size - len(data) % _ORDER.size)
        return [(index, _cause(status)) for _, index, status in _ORDER.iter_unpack(data)]

    def close(self) -> int:
        """End the nursery; it lets environments close, and ends what is left of them. Returns its exit status."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._line.send(_ORDER.pack(_CLOSE, 0, 0))
            self._line.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._line.close()
        return self._process.returncode


def _cause(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process exited ({code})"


def serve(control: int, memory: int) -> None:
    """Be the nursery until the actor closes its end or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=control) as line:
        heard = hear(line)
        if heard is None:
            return
        layout, makers = pickle.loads(heard[1])
        with contextlib.suppress(Exception, SystemExit):  # it fails again where it can be said
            pickle.loads(makers[0]).fn.prepare()
        _Brood(line, layout, makers, Slots(layout, len(makers), memory)).tend()


class _Brood:
    """The processes that the nursery has forked."""

    def __init__(self, line: socket.socket, layout: Layout, makers: list[bytes], slots: Slots) -> None:
        self._line, self._layout, self._makers, self._slots = line, layout, makers, slots
        self._indices: dict[int, int] = {}
        self._closing = False
        self._alarm, self._ring = socket.socketpair()
        self._ring.setblocking(False)
        signal.set_wakeup_fd(self._ring.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def tend(self) -> None:
        """Obey and report until told to close, or until nobody is left to tell that."""
        while not self._closing:
            readable, _, _ = select.select([self._line, self._alarm], [], [])
            if self._alarm in readable:
                self._alarm.recv(4096)
                self._reap()
            if self._line in readable and not self._obey():
                break
        until = time.monotonic() + (_GRACE_S if self._closing else 0.0)
        while self._indices and time.monotonic() < until:
            select.select([self._alarm], [], [], 0.02)
            self._reap()
        for pid in self._indices:
            _kill_group(pid)
        for pid in self._indices:
            os.waitpid(pid, 0)

    def _obey(self) -> bool:
        """Carry out one order; returns whether there may be more."""
        try:
            data, bells, _, _ = socket.recv_fds(self._line, _ORDER.size, 1)
        except ConnectionResetError:  # the actor has left without reading everything
            return False
        if not data:
            return False
        kind, index, _ = _ORDER.unpack(data)
        if kind == _SPAWN:
            self._spawn(index, bells[0])
        elif kind == _CLOSE:
            self._closing = True
        else:
            for pid in [pid for pid, whose in self._indices.items() if whose == index]:
                _kill_group(pid)
        return True

    def _spawn(self, index: int, bell: int) -> None:
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_born(index, bell, nursery)
        os.close(bell)
        with contextlib.suppress(OSError):  # the child does the same, whoever is first
            os.setpgid(pid, pid)
        self._indices[pid] = index

    def _be_born(self, index: int, bell: int, nursery: int) -> NoReturn:
        """Be the process of environment `index`."""
        code = 1
        line = socket.socket(fileno=bell)  # open to the very end: its closing is taken for this process's death
        line.set_inheritable(False)
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._line, self._alarm, self._ring):
                inherited.close()
            os.setpgid(0, 0)  # so that what the environment starts can be ended with it
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == nursery:
                work(line, index, partial(self._make, index), self._slots, self._layout)
            code = 0
        except SystemExit as request:
            code = request.code if isinstance(request.code, int) else int(request.code is not None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code & 0xFF)

    def _make(self, index: int) -> Environment:
        """Read the factory and make the environment: the user's code may fail in both."""
        env: Environment = pickle.loads(self._makers[index])()
        return env

    def _reap(self) -> None:
        """Report every process that has ended, after ending what it had started."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            _kill_group(found.si_pid)  # before its number may belong to another
            _, status = os.waitpid(found.si_pid, 0)
            index = self._indices.pop(found.si_pid)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._line.send(_ORDER.pack(_ENDED, index, status))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
