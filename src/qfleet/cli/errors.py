"""How errors reach the person at the terminal: one message and an exit code, never a traceback they did not ask for."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qfleet.core.errors import QfleetError

DEBUG = "QFLEET_DEBUG"
CRASH_FILE = "crash.txt"


class InternalError(QfleetError):
    """Something went wrong that nobody foresaw."""


@contextmanager
def crash_file_in(run_dir: Path) -> Iterator[None]:
    """Turn an unforeseen exception into an InternalError whose traceback is kept in the run's directory."""
    try:
        yield
    except (QfleetError, KeyboardInterrupt):
        raise
    except Exception as error:
        if not run_dir.is_dir():
            raise
        path = run_dir / CRASH_FILE
        path.write_text("".join(traceback.format_exception(error)))
        raise InternalError(f"{internal_error(error)}; the traceback is in {path}") from error


def internal_error(error: BaseException) -> str:
    """Return one line that says where in qfleet an unforeseen exception arose."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}qfleet{os.sep}" in frame.filename] or list(frames)
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} ({ours[-1].name})" if ours else "an unknown place"
    message = " ".join(str(error).split())
    return f"internal error in {place}: {type(error).__name__}: {message}; please report it"


def report(error: BaseException) -> int:
    """Show an error on standard error and return the exit code it stands for."""
    if isinstance(error, BrokenPipeError):
        # Whoever read the output has seen enough (`| head`); the interpreter must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    if isinstance(error, QfleetError):
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    hint = "" if os.environ.get(DEBUG) else f" (the same command with {DEBUG}=1 shows the traceback)"
    print(f"error: {internal_error(error)}{hint}", file=sys.stderr)
    return 3
