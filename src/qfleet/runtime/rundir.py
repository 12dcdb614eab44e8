"""A run's directory: where its files are, its epoch, and who owns it: a second process is kept out."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from qfleet.core.errors import ConfigError, QfleetError, came_of_interrupt
from qfleet.core.failpoints import failpoint
from qfleet.runtime.epochs import Epoch
from qfleet.runtime.held_back import held_back
from qfleet.runtime.ownership import INTERRUPTED, Ownership, interrupt_main_thread, look, refusal

MEETING = ".rendezvous-"
"""How the names of files begin by which the learners of a run meet."""


class RunDir:
    """Paths of one run; a context manager that owns the directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.plan = path / "plan.yaml"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.summary = path / "summary.json"
        self.end: Callable[[], bool] = lambda: False
        """Called in another thread when somebody asks for the run's end, until it returns True; Ctrl-C where it can."""
        self.ended_by = ""
        """Who asked for that: USER@HOST."""
        self.wished: Callable[[dict[str, Any]], bool] = lambda wish: False
        """Called in another thread with each request for other numbers of roles, until it returns True."""
        self._ownership: Ownership | None = None
        self._epoch: Epoch | None = None
        self.begun = False
        """Whether anything came of the run that must be kept."""
        self._made = False

    @classmethod
    def create(cls, path: Path) -> RunDir:
        """Make the directory for a new run; refuses one that holds a run already."""
        run = cls(path)
        try:
            held, run._made = run.config.exists(), not path.exists()
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run directory {path} cannot be made: {error.strerror}") from error
        if not held and (inside := _runs_in(path)):
            raise ConfigError(
                f"{path} is a folder of runs, {inside} among them: choose another --run-dir, such as {path / 'new'}"
            )
        if held:
            if (sight := look(path)).alive:
                raise refusal(path, sight)
            raise ConfigError(
                f"{path} already holds a run: go on with `qfleet resume {path}`, or choose another --run-dir"
            )
        return run

    @classmethod
    def existing(cls, path: Path) -> RunDir:
        """Return the directory of an earlier run; refuses one that holds none."""
        run = cls(path)
        if not run.config.is_file():
            raise ConfigError(f"{path} holds no run: there is no config.yaml in it")
        return run

    def __enter__(self) -> RunDir:
        with held_back() as held:
            self._ownership = Ownership.acquire(self.path, self._asked, lambda wish: self.wished(wish))
            try:
                self._epoch = Epoch.begin(self.checkpoints)
            except OSError as error:
                self._ownership.release()
                raise ConfigError(f"{self.checkpoints} cannot be written: {error.strerror}") from error
        try:
            held.deliver()
        except BaseException as error:
            self._ownership.release(ending(error))
            raise
        if threading.current_thread() is threading.main_thread():
            self.end = interrupt_main_thread  # last: what cut in before would leave the directory without a word
        return self

    def _asked(self, by: str) -> bool:
        self.ended_by = by
        return self.end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with held_back() as held:
            self._leave(error)
        held.deliver()

    def _leave(self, error: BaseException | None) -> None:
        for place in self.epoch.folder.glob(f"{MEETING}*"):
            place.unlink(missing_ok=True)  # ranks that were killed left it
        refused = not self.begun and getattr(error, "exit_code", 0) == ConfigError.exit_code
        if self._made and refused:
            shutil.rmtree(self.path)  # leave nothing behind
        if self._ownership is not None:
            if refused:
                self._ownership.forgo(ending(error))
            else:
                self._ownership.release(ending(error))
            self._ownership = None

    @property
    def epoch(self) -> Epoch:
        """This use of the directory; only while the lock is held."""
        assert self._epoch is not None, "the directory is not in use"
        return self._epoch

    def write(self, path: Path, text: str) -> None:
        """Write a file of the run, complete or not at all; Superseded if another process has taken the run over."""
        self.epoch.require()
        try:
            write_atomically(path, text)
        except OSError as error:
            self.epoch.require()
            raise QfleetError(f"{path}: cannot be written ({error.strerror}); is there room on the disk?") from error

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        self.write(self.summary, json.dumps(summary, indent=1) + "\n")


def _runs_in(folder: Path) -> str:
    """Return the name of a run that lies in a folder, or an empty string."""
    return next((found.parent.name for found in folder.glob("*/config.yaml")), "")


def ending(error: BaseException | None) -> str:
    """Return how an error that ends a run is told; empty for none."""
    if error is None:
        return ""
    if isinstance(error, QfleetError):
        return str(error)
    return INTERRUPTED if came_of_interrupt(error) else f"{type(error).__name__}: {error}"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by a new version in one step."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        failpoint(f"write.{path.stem}")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)  # half of it would take what room there is
        raise
