"""What supervisors and workers say to each other; imports little, for those who only pass it on."""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qfleet.core.errors import EnvironmentFault, QfleetError, RoleFailure
from qfleet.core.protocols import Report
from qfleet.core.role import WORKED, Status

Command = Literal["run", "pause", "step", "report", "save", "restore", "part", "stop"]

_CALLS = 3
"""How many calls are told of a process that crashed."""


@dataclass(frozen=True)
class Answer:
    """What a worker tells its supervisor: a command carried out, "built", "written", "done", "failed" or "died"."""

    what: str
    cause: str = ""
    """Of a failure, or of a state that could not be written: what a person reads."""
    exit_code: int = 0
    """Of a failure: that of the error, so that a mistake of the user's stays one."""
    trace: str = ""
    """Of a failure: where it happened."""
    status: Status = WORKED
    """Of a step in lock-step: what it returned; the handles to wait on stay here."""
    report: Report | None = None
    """Of a report that was asked for."""
    lost: bool = False
    """Of a failure: whether somebody whom it worked with was gone."""
    fault: bool = False
    """Of a failure: whether it was an environment's, and not the role's own."""


def failed(error: Exception) -> Answer:
    """Return the answer that tells of an error."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, RoleFailure):
        lost = isinstance(error.__cause__, ConnectionError)
        return Answer("failed", error.cause, error.exit_code, trace, lost=lost)
    if isinstance(error, EnvironmentFault):
        return Answer("failed", str(error), error.exit_code, trace, fault=True)
    if isinstance(error, QfleetError):
        return Answer("failed", str(error), error.exit_code, trace)
    cause, lost = f"{type(error).__name__}: {error}", isinstance(error, ConnectionError)
    return Answer("failed", cause, QfleetError.exit_code, trace, lost=lost)


def last_words(path: Path) -> str:
    """Return where a process was when it crashed, its innermost calls; empty if it did not say."""
    with contextlib.suppress(OSError):
        calls = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.startswith("  File ")]
        return f"; it was at {', called from '.join(calls[:_CALLS])}" if calls else ""
    return ""
