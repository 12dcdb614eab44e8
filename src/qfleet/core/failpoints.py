"""Named places at which a process can be made to die on purpose, to prove that the run survives it.

`QFLEET_FAIL=replay.before_commit:kill@3,actor-0/worker.step:hang@100` kills every role that passes
`replay.before_commit` when it does so the third time, and hangs actor-0 in its hundredth step. `stop` lasts until
somebody continues the process, `full` is what a write meets on a full disk, and `slow` takes half a second.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from dataclasses import dataclass

from qfleet.core.errors import ConfigError

VARIABLE = "QFLEET_FAIL"
_SYNTAX = re.compile(
    r"(?:(?P<role>[\w-]+)/)?(?P<name>[\w.]+):(?P<action>kill|exit|raise|hang|stop|full|slow)@(?P<count>[1-9]\d*)(?P<always>:always)?"
)
_EXIT_CODE = 70
_SLOW_S = 0.5


@dataclass(frozen=True)
class Failpoint:
    """What happens where, and when."""

    role: str
    """Name of the only process that it is meant for, such as "actor-0"; empty for every role."""
    name: str
    action: str
    count: int
    """The how-manieth passing it is, from 1."""
    always: bool
    """Whether in every life of a role, not only in its first."""


_armed: dict[str, list[Failpoint]] = {}
_passed: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Pass a named place; costs nothing where no failpoint is armed."""
    if _armed:
        _pass(name)


def wanted() -> str:
    """Return what the environment asks for."""
    return os.environ.get(VARIABLE, "")


def parse(text: str) -> list[Failpoint]:
    """Return the failpoints that a value of `QFLEET_FAIL` names."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _SYNTAX.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"{VARIABLE}: '{part}' is not [ROLE/]NAME:ACTION@COUNT[:always], such as actor-0/worker.step:kill@3; "
                "actions are kill, exit, raise, hang, stop, full and slow, counts begin at 1"
            )
        role, name, action, count, always = match.groups()
        found.append(Failpoint(role or "", name, action, int(count), always is not None))
    return found


def arm(text: str, role: str, life: int = 0, everyone: bool = True) -> None:
    """Make this process, which is `role` in its `life`, heed a value of `QFLEET_FAIL`; counts begin anew.

    Without `everyone` it heeds only what names it: a supervisor is not meant by a failpoint of all roles.
    """
    _armed.clear()
    _passed.clear()
    for point in parse(text):
        meant = point.role == role or (everyone and not point.role)
        if meant and (life == 0 or point.always):
            _armed.setdefault(point.name, []).append(point)


def _pass(name: str) -> None:
    if name not in _armed:
        return
    _passed[name] = _passed.get(name, 0) + 1
    for point in _armed[name]:
        if point.count == _passed[name]:
            _act(point)


def _act(point: Failpoint) -> None:
    if point.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if point.action == "exit":
        os._exit(_EXIT_CODE)
    if point.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if point.action == "slow":
        time.sleep(_SLOW_S)
        return
    if point.action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"failpoint {point.name}")
    if point.action == "raise":
        raise RuntimeError(f"failpoint {point.name}")
    while True:
        time.sleep(3600)
