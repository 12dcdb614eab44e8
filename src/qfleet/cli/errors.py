"""How errors reach the person at the terminal: one message and an exit code, never a traceback they did not ask for."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from qfleet.core.errors import QfleetError

DEBUG = "QFLEET_DEBUG"
CRASH_FILE = "crash.txt"
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""What a full or protected disk says."""


class InternalError(QfleetError):
    """Something went wrong that nobody foresaw."""


class InterruptWatch:
    """Makes SIGTERM a Ctrl-C, and remembers one whose KeyboardInterrupt got lost.

    The initialisation of compiled modules, such as torch, drops it and leaves its work unfinished; then anything fails.
    """

    def __init__(self) -> None:
        self.seen = False
        self.note = ""
        """What an interrupt now would leave behind, for a person."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Watch during one command; only the main thread can, elsewhere nothing changes."""
        self.seen, self.note = False, ""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def caused(self, error: BaseException | None) -> bool:
        """Return whether an error is a Ctrl-C or comes from one."""
        while error is not None and not isinstance(error, KeyboardInterrupt):
            error = error.__cause__ or error.__context__
        return self.seen or error is not None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        raise KeyboardInterrupt


WATCH = InterruptWatch()
"""One for the process, as its signals are."""


@contextmanager
def crash_file_in(run_dir: Path) -> Iterator[None]:
    """Turn an unforeseen exception into an InternalError whose traceback is kept in the run's directory."""
    if WATCH.seen:  # before anything begins with modules that it has left unfinished
        raise KeyboardInterrupt
    try:
        yield
    except (QfleetError, KeyboardInterrupt):
        if any((run_dir / "checkpoints").glob("[0-9]*")):
            WATCH.note = f"go on with: qfleet resume {run_dir}"
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NOT_WRITTEN:
            where = error.filename or run_dir
            text = f"{where}: cannot be written ({error.strerror}); when it can, go on with: qfleet resume {run_dir}"
            raise QfleetError(text) from error
        if WATCH.caused(error) or not run_dir.is_dir():
            raise
        path, where = run_dir / CRASH_FILE, ""
        with contextlib.suppress(OSError):
            path.write_text("".join(traceback.format_exception(error)))
            where = f"; the traceback is in {path}"
        raise InternalError(f"{internal_error(error)}{where}") from error


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
    if isinstance(error, QfleetError) and not WATCH.seen:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if WATCH.caused(error):
        print(f"interrupted: {WATCH.note}" if WATCH.note else "interrupted", file=sys.stderr)
        return 130
    hint = "" if os.environ.get(DEBUG) else f" (the same command with {DEBUG}=1 shows the traceback)"
    print(f"error: {internal_error(error)}{hint}", file=sys.stderr)
    return 3
