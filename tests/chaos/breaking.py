"""Kills and stops processes at random moments, and has clocks jump, from a thread that the run knows nothing of."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import clocks
import numpy as np
from cases import CLOCK, PAUSES, Case

PAUSED_S = 1.0
"""The longest that a process is stopped for."""


class Breaker(threading.Thread):
    """Breaks one process after the other, whatever the run is doing, until it has killed enough or the run is over."""

    def __init__(self, what: Case, rng: np.random.Generator) -> None:
        super().__init__(name="breaker", daemon=True)
        self._what, self._rng = what, rng
        self._broken: set[int] = set()
        self._over = threading.Event()
        self.placement: Any = None
        self.killed: list[tuple[str, str]] = []
        """Role and phase of each process that was killed."""
        self.times: list[float] = []
        """When that was, by a clock that does not jump."""
        self.paused = self.jumps = 0

    def run(self) -> None:
        while len(self.killed) < self._what.kills and not self._over.wait(self._rng.uniform(*self._what.between_s)):
            if self.placement is None:
                continue
            if self._what.faults == CLOCK:
                clocks.jump(Path(os.environ[clocks.FILE]), self._rng)
                self.jumps += 1
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                self._break_one()

    def stop(self) -> None:
        """Break nothing more."""
        self._over.set()
        self.join()

    def _break_one(self) -> None:
        # A copy by `dict` is made in one step of the interpreter: the run's own thread changes the original.
        pids = dict(self.placement.pids())
        phases = {f"{report.kind}-{report.index}": report.phase for report in self.placement.reports()}
        living = sorted(name for name, pid in pids.items() if pid)  # an actor of Ray has 0 until it has said its number
        if not living:
            return
        name = str(self._rng.choice(living))
        if self._what.faults == PAUSES and self._rng.random() < 0.3:
            os.kill(pids[name], signal.SIGSTOP)
            self._over.wait(self._rng.uniform(0, PAUSED_S))
            os.kill(pids[name], signal.SIGCONT)
            self.paused += 1
        elif pids[name] not in self._broken and self._kill(name, pids[name]):
            self._broken.add(pids[name])
            self.killed.append((name, phases.get(name, "unknown")))
            self.times.append(time.monotonic())

    def _kill(self, name: str, pid: int) -> bool:
        """Kill a process, on Ray every fourth time that of its steward; returns whether the run was still there."""
        life = self.placement._lives.get(name)
        if self.placement.name == "ray" and len(self.killed) % 4 == 3 and life is not None and life.pid == pid:
            import ray

            if not ray.is_initialized():  # it would start another Ray to ask
                return False
            ray.kill(life.line.steward)
        else:
            os.kill(pid, signal.SIGKILL)
        return True
