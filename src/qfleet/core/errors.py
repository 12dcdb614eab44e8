"""The errors qfleet raises on purpose; each one says what happened, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QfleetError(Exception):
    """Base of every error that a user is meant to read; shown without a traceback on the command line."""

    exit_code = 3


class ConfigError(QfleetError):
    """A setting is unknown, has the wrong type or range, or contradicts another one."""

    exit_code = 2


class EnvironmentFault(QfleetError):
    """An environment broke its own contract: NaN reward, wrong shape or dtype, or an exception."""


class CheckpointError(QfleetError):
    """A checkpoint or model file is missing, damaged, foreign, or of an unsupported version."""


class PartLost(CheckpointError):
    """A role died while it wrote its part of a checkpoint, which can be made anew when the role lives again."""


class Superseded(QfleetError):
    """Another process has taken the run over; this one may not write to its directory any more."""


class RoleFailure(QfleetError):
    """A role of the running program failed; names the role, its index and the cause."""

    def __init__(self, role: str, index: int, cause: str, died: bool = False) -> None:
        """Take whether it `died` rather than raised an error, which it would again."""
        super().__init__(f"{role}[{index}] failed: {cause}")
        self.role, self.index, self.cause, self.died = role, index, cause, died

    def __reduce__(self) -> tuple[type[RoleFailure], tuple[str, int, str, bool]]:
        """Travel between processes with all parts."""
        return type(self), (self.role, self.index, self.cause, self.died)


class Deadlock(QfleetError):
    """Every role of a host is idle and nothing can wake any of them."""


class MissingExtra(QfleetError):
    """An optional dependency is needed for what was asked; names the extra that brings it."""

    exit_code = 2

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}'; install it with: pip install 'qfleet[{extra}]'")


def came_of_interrupt(error: BaseException | None) -> bool:
    """Return whether an error is a Ctrl-C, or an error that a library made of one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""
