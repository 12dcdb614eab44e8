"""What an actor makes of its environments' faults: the end of its life, which another one follows, or of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qfleet.core.errors import ConfigError, EnvironmentFault, RoleFailure
from qfleet.roles.progress import Progress


@contextmanager
def faults_told(kind: str, index: int, progress: Progress) -> Iterator[None]:
    """Let a fault through, of which a supervisor makes a death; in a second life without one step it ends the run.

    What could be made in a former life and cannot be now is a fault, too: no setting is wrong.
    """
    try:
        yield
    except (EnvironmentFault, ConfigError) as error:
        if not progress.life:
            raise
        if not progress.counted:  # what never worked will not begin to
            raise RoleFailure(kind, index, f"{str(error).rstrip('.')}; that was the second try") from error
        if isinstance(error, EnvironmentFault):
            raise
        raise EnvironmentFault(str(error)) from error
