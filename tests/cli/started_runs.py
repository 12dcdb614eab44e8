"""Real runs in processes of their own, which must end soon and leave nothing behind."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from commands import environment, start_words

from qfleet.runtime.memory import shared_memory_root

SOON_S, LOADED_S = 10.0, 30.0
"""How long an end may take; and a process that is still loading modules, which heeds nothing before it has done so."""
SMALL = {
    "env-steps": "100000000",
    "topology": "pipeline",
    "network.hidden": "16",
    "learner.learning-starts": "100",
    "checkpoint.every": "1000000000",
    "evaluation.every": "1000000000",
    "track.every-s": "0.1",
}
PROCESSES = {"placement": "processes", "actors": "2"}
Flags = dict[str, str]


class Started:
    """A run in a session of its own, as a terminal has one."""

    def __init__(self, run: Path, flags: Flags, preset: str = "gym:CartPole-v1", more: Flags | None = None) -> None:
        words = [word for name, value in {**SMALL, **flags}.items() for word in (f"--{name}", value)]
        self.run = run
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where tests run under `nohup` it would inherit that
        try:
            self.process = subprocess.Popen(
                start_words(["train", preset, "--run-dir", str(run), "--quiet", *words]),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=environment() | (more or {}),
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGHUP, ignored)
        self.family: dict[int, psutil.Process] = {}

    def wait_for(self, moment: Callable[[Path], bool], seconds: float = 0.0) -> None:
        """Wait for a moment, and then so much longer."""
        until = time.monotonic() + 120
        while not moment(self.run):
            assert self.process.poll() is None, self.errors()
            assert time.monotonic() < until, "the moment did not come"
            self.look()
            time.sleep(0.005)
        time.sleep(seconds)
        self.look()

    def look(self) -> None:
        """Remember all processes that the run has started so far."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self.family.setdefault(process.pid, process)

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode()

    def end(self) -> int:
        """Wait for the end; return the exit code. Fails if that takes long, or if anything is left."""
        code = self.process.wait(SOON_S)
        until = time.monotonic() + LOADED_S
        while (left := [process for process in self.family.values() if lives(process)]) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left, [process.cmdline() for process in left]
        assert not list(shared_memory_root().glob(f"*qfleet-{self.process.pid}-*"))
        assert "Traceback" not in self.errors()
        return code

    def clean_up(self) -> None:
        """Leave nothing to the next test, whatever went wrong."""
        if self.process.poll() is None:
            self.look()
            self.process.kill()
        self.process.wait()
        for process in filter(lives, self.family.values()):
            process.kill()
        self._errors.close()


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def started(run: Path) -> bool:
    return (run / "config.yaml").is_file()


def training(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0
