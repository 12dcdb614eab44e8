"""A whole training loop on one device: acts, stores, learns and evaluates without sending anything to anyone.

Receives: nothing.
Sends: Evaluated and Notices to the run's monitor.
Waits for: room for its results; one of several that learn as one, for the others.
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
from qfleet.core.protocols import Counter, Keep, Sender
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.types import Evaluated, Notice, Version
from qfleet.roles.fused.evaluation import DeviceEvaluation
from qfleet.roles.fused.loop import Loop, Progress
from qfleet.roles.fused.replay_loop import ReplayLoop
from qfleet.roles.fused.rollout_loop import RolloutLoop
from qfleet.roles.fused.setup import FusedSetup, without_effect
from qfleet.roles.fused.snapshots import Snapshots
from qfleet.roles.fused.team import Team
from qfleet.roles.joining import placed
from qfleet.roles.weight_store import snapshot


@dataclass(frozen=True)
class FusedHandles:
    """What a fused loop sees of the run; of several loops only the first speaks and counts."""

    events: Sender[Evaluated | Notice] | None
    env_steps: Counter | None
    updates: Counter | None
    samples: Counter | None
    keep: Keep | None = None
    """Where states outlive the loop; None where nothing does."""


class Fused(Role):
    """One device that does everything."""

    kind = "fused"

    def __init__(self, setup: FusedSetup, handles: FusedHandles) -> None:
        setup, self._handles = placed(setup), handles
        life = 0 if handles.keep is None else handles.keep.life
        self._team = None if setup.group is None else Team(setup.group, setup.parallel, setup.seed, life, setup.device)
        self._build(setup)
        self._best, self._due = -np.inf, 0
        self._skips = self._skipped = self._batches = 0
        self._finished = False
        self._describe()
        if idle := without_effect(setup):
            self._notice("no_effect", f"a fused loop makes no use of {' and '.join(idle)}")
        if self._loop.report:
            self._notice("warm_start", self._loop.report)
            self._loop.report = ""
        self._snapshots = None if self._team is None or handles.keep is None else Snapshots(handles.keep, self._team)
        if self._snapshots is not None and life > 0:
            self._recover(self._snapshots)

    def _build(self, setup: FusedSetup) -> None:
        self._setup = setup
        kind = ReplayLoop if isinstance(setup.agent, ReplayAgent) else RolloutLoop
        self._loop: Loop = kind(setup, self._team)
        self._evaluation = DeviceEvaluation(setup, self._loop.choices) if setup.rank == 0 else None

    def _recover(self, snapshots: Snapshots) -> None:
        """Go on from the last state that all ranks kept in former lives of the group."""
        state = snapshots.restore()
        if state is not None:
            self._load(state["role"])
            self._batches = state["batches"]
        counters = (self._handles.env_steps, self._handles.updates, self._handles.samples)
        # A counter outlives its role's lives, and so knows of all that was counted and is to be done again.
        lost = [0 if one is None else one.own() - now for one, now in zip(counters, self._counts, strict=True)]
        self._count(*(-count for count in lost))
        self._commit(snapshots)
        text = f"the loops were restarted from update {self._loop.update.updates}: {lost[1]} updates lost"
        self._notice("restarted", text)

    def _commit(self, snapshots: Snapshots) -> None:
        """Make the present state outlive this process."""
        snapshots.commit({"role": self._state(self._loop.whole_state()), "batches": self._batches})

    def _describe(self) -> None:
        """Say how updates are computed, and what of the network cannot be resumed exactly."""
        group = "" if self._team is None else f"; {self._team.joining.description}"
        self._notice("accel", f"{self._loop.choices.description}{group}")
        if text := foreign_randomness(self._loop.update.online):
            self._notice("inexact", text)

    def step(self) -> Status:
        """Evaluate if that is due, else act and learn for a while."""
        events = self._handles.events
        if events is not None and not events.ready():
            return Idle("results are not read", wake_on=(events,))
        over = self._loop.over
        due = self._loop.steps // self._setup.evaluation.every
        if self._finished:
            return DONE
        if over or due > self._due:
            self._due, self._finished = due, over
            self._evaluate()
            return WORKED
        progress = self._loop.advance()
        self._batches += progress.batches
        self._count(progress.steps, progress.updates, progress.batches)
        self._guard(progress)
        if self._team is not None:
            self._name_skips(self._team, progress)
            self._team.meet()
        if self._snapshots is not None and self._snapshots.due(self._setup.learner.snapshot_s):
            self._commit(self._snapshots)
        return WORKED

    @property
    def _counts(self) -> tuple[int, int, int]:
        """Transitions, updates and batches so far, as the first loop counts them."""
        return self._loop.steps, self._loop.update.updates, self._batches

    def _count(self, steps: int, updates: int, batches: int) -> None:
        counters = (self._handles.env_steps, self._handles.updates, self._handles.samples)
        for counter, count in zip(counters, (steps, updates, batches), strict=True):
            if counter is not None:
                counter.add(count)

    def _evaluate(self) -> None:
        """Evaluate on the first rank; the others wait for it in a phase that may take as long."""
        self.phase = "evaluating"
        if self._evaluation is not None:
            self._send_evaluation(self._evaluation)
        if self._team is not None:
            self._team.meet()
        self.phase = "running"

    def _send_evaluation(self, evaluation: DeviceEvaluation) -> None:
        began, events = time.perf_counter(), self._handles.events
        assert events is not None
        returns, lengths = evaluation.play(self._loop.evaluated)
        mean = float(returns.mean())
        self._loop.update.score(mean)
        # Of equal scores the later one is kept: it has seen more.
        best, self._best = mean >= self._best, max(self._best, mean)
        version = Version(0, self._loop.update.updates)
        weights = snapshot(self._loop.evaluated, version, self._loop.steps) if best else None
        seconds = time.perf_counter() - began
        events.send(Evaluated(version, self._loop.steps, returns, lengths, seconds, best, weights))

    def _guard(self, progress: Progress) -> None:
        """Name skipped updates; give up when all of several in a row were and no loss scale is to blame."""
        self._skipped += progress.skipped
        forgiven = self._loop.choices.forgiven() if progress.skipped else 0
        self._skips = max(progress.streak - forgiven, 0) + (0 if progress.updates else self._skips)
        # Those that were made divide the others into rows, of which one has its share at least, wherever it was.
        row = max(math.ceil((progress.skipped - forgiven) / (progress.updates + 1)), self._skips)
        blamed = self._team.blamed() if self._team is not None and progress.skipped else []
        loss = f" (the losses of rank {', '.join(map(str, blamed))})" if blamed else ""
        if row >= self._setup.learner.skips:
            raise QfleetError(
                f"{row} updates in a row were not finite (NaN or infinity){loss}, the last ones after update"
                f" {self._loop.update.updates}. Checkpoints saved before are kept."
                " Lower optim.lr, set optim.max_grad_norm, or check the rewards."
            )
        if progress.skipped:
            before = f"before update {self._loop.update.updates + 1}"
            self._notice("skipped_update", f"{progress.skipped} updates {before} were not finite{loss}: skipped")

    def _name_skips(self, team: Team, progress: Progress) -> None:
        """Name the updates that other ranks skipped, where they learn apart: only the first can tell of them."""
        if team.apart:
            for rank, count in team.joining.skipped_apart(progress.skipped).items():
                text = f"{count} updates of rank {rank} before update {self._loop.update.updates + 1} were not finite"
                self._notice("skipped_update", f"{text}: skipped")

    def _notice(self, kind: str, text: str) -> None:
        if self._handles.events is not None and self._handles.events.ready():
            self._handles.events.send(Notice(self.kind, 0, kind, text))

    def metrics(self) -> Mapping[str, float]:
        """Return the loop's numbers; reading them waits for the device."""
        update = self._loop.update
        own = {"updates": float(update.updates), "learning_rate": update.learning_rate}
        sent = {} if self._team is None else self._team.joining.metrics()
        skipped = {"skipped_updates": float(self._skipped)}
        return {**self._loop.metrics(), **own, **sent, **skipped, "policy_lag": 0.0, "policy_lag_mean": 0.0}

    def state_dict(self) -> State:
        """Return the loop and how its evaluations stand."""
        return self._state(self._loop.state_dict())

    def _state(self, loop: State) -> State:
        counters = [self._due, self._skips, self._skipped, self._finished]
        return {"loop": loop, "best": self._best, "counters": counters}

    def load_state_dict(self, state: State) -> None:
        """Continue; a longer budget goes on after the end."""
        self._load(state)
        if self._handles.samples is not None:
            self._batches = self._handles.samples.own()
        if self._snapshots is not None:
            self._commit(self._snapshots)

    def _load(self, state: State) -> None:
        self._compute_as_before(state["loop"]["settings"])
        self._loop.load_state_dict(state["loop"])
        if self._loop.report:
            self._notice("accel_changed", self._loop.report)
        self._best = state["best"]
        self._due, self._skips, self._skipped, finished = state["counters"]
        self._finished = bool(finished) and self._loop.steps >= self._setup.env_steps

    def close(self) -> None:
        """Leave the group, and give the process's switches back."""
        set_deterministic(False)
        if self._team is not None:
            self._team.close()

    def _compute_as_before(self, saved: Mapping[str, Any]) -> None:
        """Build the loop anew with the settings it had, where a probe's choice since then has others."""
        former = Settings.model_validate({name: saved[name] for name in saved if name in Settings.model_fields})
        if former == self._loop.choices.settings:
            return
        setup = replace(self._setup, former=former)
        del self._loop, self._evaluation  # a device may not have room for two
        self._build(setup)
        self._describe()
