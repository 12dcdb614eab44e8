"""A whole training loop on one device: acts, stores, learns and evaluates without sending anything to anyone.

Receives: nothing.
Sends: Evaluated and Notices to the run's monitor.
Waits for: room for its results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qfleet.accel.precision import set_deterministic
from qfleet.accel.table import Settings
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import foreign_randomness
from qfleet.core.errors import QfleetError
from qfleet.core.protocols import Counter, Sender
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.types import Evaluated, Notice, Version
from qfleet.roles.fused.evaluation import DeviceEvaluation
from qfleet.roles.fused.loop import Loop, Progress
from qfleet.roles.fused.replay_loop import ReplayLoop
from qfleet.roles.fused.rollout_loop import RolloutLoop
from qfleet.roles.fused.setup import FusedSetup, without_effect
from qfleet.roles.weight_store import snapshot


@dataclass(frozen=True)
class FusedHandles:
    """What a fused loop sees of the run."""

    events: Sender[Evaluated | Notice]
    env_steps: Counter
    updates: Counter
    samples: Counter


class Fused(Role):
    """One device that does everything."""

    kind = "fused"

    def __init__(self, setup: FusedSetup, handles: FusedHandles) -> None:
        self._handles = handles
        self._build(setup)
        self._best, self._due = -np.inf, 0
        self._skips = self._skipped = 0
        self._finished = False
        self._describe()
        if idle := without_effect(setup):
            self._notice("no_effect", f"a fused loop makes no use of {' and '.join(idle)}")
        if self._loop.report:
            self._notice("warm_start", self._loop.report)
            self._loop.report = ""

    def _build(self, setup: FusedSetup) -> None:
        self._setup = setup
        self._loop: Loop = ReplayLoop(setup) if isinstance(setup.agent, ReplayAgent) else RolloutLoop(setup)
        self._evaluation = DeviceEvaluation(setup, self._loop.choices)

    def _describe(self) -> None:
        """Say how updates are computed, and what of the network cannot be resumed exactly."""
        self._notice("accel", self._loop.choices.description)
        if text := foreign_randomness(self._loop.update.online):
            self._notice("inexact", text)

    def step(self) -> Status:
        """Evaluate if that is due, else act and learn for a while."""
        if not self._handles.events.ready():
            return Idle("results are not read", wake_on=(self._handles.events,))
        over = self._loop.over
        due = self._loop.steps // self._setup.evaluation.every
        if self._finished:
            return DONE
        if over or due > self._due:
            self._due, self._finished = due, over
            self._evaluate()
            return WORKED
        progress = self._loop.advance()
        self._handles.env_steps.add(progress.steps)
        self._handles.updates.add(progress.updates)
        self._handles.samples.add(progress.batches)
        self._guard(progress)
        return WORKED

    def _evaluate(self) -> None:
        self.phase, began = "evaluating", time.perf_counter()
        returns, lengths = self._evaluation.play(self._loop.evaluated)
        mean = float(returns.mean())
        self._loop.update.score(mean)
        # Of equal scores the later one is kept: it has seen more.
        best, self._best = mean >= self._best, max(self._best, mean)
        version = Version(0, self._loop.update.updates)
        weights = snapshot(self._loop.evaluated, version, self._loop.steps) if best else None
        seconds = time.perf_counter() - began
        self._handles.events.send(Evaluated(version, self._loop.steps, returns, lengths, seconds, best, weights))
        self.phase = "running"

    def _guard(self, progress: Progress) -> None:
        """Name skipped updates; give up when all of several in a row were and no loss scale is to blame."""
        self._skipped += progress.skipped
        forgiven = self._loop.choices.forgiven() if progress.skipped else 0
        self._skips = max(progress.streak - forgiven, 0) + (0 if progress.updates else self._skips)
        # Those that were made divide the others into rows, of which one has its share at least, wherever it was.
        row = max(math.ceil((progress.skipped - forgiven) / (progress.updates + 1)), self._skips)
        if row >= self._setup.learner.skips:
            raise QfleetError(
                f"{row} updates in a row were not finite (NaN or infinity), the last ones after update"
                f" {self._loop.update.updates}. Checkpoints saved before are kept."
                " Lower optim.lr, set optim.max_grad_norm, or check the rewards."
            )
        if progress.skipped:
            text = f"{progress.skipped} updates before update {self._loop.update.updates + 1} were not finite: skipped"
            self._notice("skipped_update", text)

    def _notice(self, kind: str, text: str) -> None:
        if self._handles.events.ready():
            self._handles.events.send(Notice(self.kind, 0, kind, text))

    def metrics(self) -> Mapping[str, float]:
        """Return the loop's numbers; reading them waits for the device."""
        update = self._loop.update
        own = {"updates": float(update.updates), "learning_rate": update.learning_rate}
        return {**self._loop.metrics(), **own, "skipped_updates": float(self._skipped), "policy_lag": 0.0}

    def state_dict(self) -> State:
        """Return the loop and how its evaluations stand."""
        counters = [self._due, self._skips, self._skipped, self._finished]
        return {"loop": self._loop.state_dict(), "best": self._best, "counters": counters}

    def load_state_dict(self, state: State) -> None:
        """Continue; a longer budget goes on after the end."""
        self._compute_as_before(state["loop"]["settings"])
        self._loop.load_state_dict(state["loop"])
        if self._loop.report:
            self._notice("accel_changed", self._loop.report)
        self._best = state["best"]
        self._due, self._skips, self._skipped, finished = state["counters"]
        self._finished = bool(finished) and self._loop.steps >= self._setup.env_steps

    def close(self) -> None:
        """Give the process's switches back."""
        set_deterministic(False)

    def _compute_as_before(self, saved: Mapping[str, Any]) -> None:
        """Build the loop anew with the settings it had, where a probe's choice since then has others."""
        former = Settings.model_validate({name: saved[name] for name in saved if name in Settings.model_fields})
        if former == self._loop.choices.settings:
            return
        setup = replace(self._setup, former=former)
        del self._loop, self._evaluation  # a device may not have room for two
        self._build(setup)
        self._describe()
