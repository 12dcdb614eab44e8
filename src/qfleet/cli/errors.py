"""How errors reach the person at the terminal: one message and an exit code, never a traceback they did not ask for."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from qfleet.core.errors import QfleetError, came_of_interrupt
from qfleet.runtime.held_back import ENDINGS
from qfleet.runtime.ownership import interrupt_main_thread

DEBUG = "QFLEET_DEBUG"
INTERRUPTED = 130
"""The exit code of what a signal ended, as a shell has it."""
CRASH_FILE = "crash.txt"
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""What a full or protected disk says."""
_AGAIN_S, _LOST_S = 0.02, 1.0
"""How soon an interrupt comes again that was ignored for certain, and one of which nothing is to be seen."""


class InternalError(QfleetError):
    """Something went wrong that nobody foresaw."""


class InterruptWatch:
    """Makes SIGTERM and a closed terminal a Ctrl-C, and remembers one whose KeyboardInterrupt got lost.

    The initialisation of compiled modules, such as torch, drops it and may leave its work unfinished; then anything
    fails. Callbacks from C, as numba's compiler has them, only show it and go on. In both cases it is raised again.
    """

    def __init__(self) -> None:
        self.seen = self._watching = False
        self._coming: list[threading.Timer] = []
        self.note = ""
        """What an interrupt now would leave behind, for a person."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Watch during one command; only the main thread can, elsewhere nothing changes."""
        self.seen, self.note = False, ""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in ENDINGS if signal.getsignal(number) not in (None, signal.SIG_IGN)]
        before = {number: signal.signal(number, self._interrupt) for number in heard}
        show, sys.unraisablehook = sys.unraisablehook, partial(self._shown, sys.unraisablehook)
        self._watching = True
        try:
            yield
        finally:
            self._watching, sys.unraisablehook = False, show
            while self._coming:
                self._coming.pop().cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    def caused(self, error: BaseException | None) -> bool:
        """Return whether an error is a Ctrl-C or comes from one."""
        return self.seen or came_of_interrupt(error)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        self._again_in(_LOST_S)
        raise KeyboardInterrupt

    def _shown(self, show: Callable[[sys.UnraisableHookArgs], object], what: sys.UnraisableHookArgs) -> None:
        """Interrupt again where the interpreter would only show an interrupt, and go on."""
        if isinstance(what.exc_value, KeyboardInterrupt):
            self._again_in(_AGAIN_S)  # not from here, where it would be ignored once more
        else:
            show(what)

    def _again_in(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._again)
        timer.daemon = True
        self._coming.append(timer)
        timer.start()

    def _again(self) -> None:
        # A run that has heard it takes this for the same; what is being closed because of it must not be cut short.
        if self._watching and not came_of_interrupt(_handled_by_main_thread()):
            interrupt_main_thread()


def _handled_by_main_thread() -> BaseException | None:
    """Return the exception that the main thread is about to handle, if any."""
    main = threading.main_thread().ident
    assert main is not None
    found: Any = sys._current_exceptions().get(main)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # three things before Python 3.12
    return error


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
        return INTERRUPTED
    hint = "" if os.environ.get(DEBUG) else f" (the same command with {DEBUG}=1 shows the traceback)"
    print(f"error: {internal_error(error)}{hint}", file=sys.stderr)
    return 3
