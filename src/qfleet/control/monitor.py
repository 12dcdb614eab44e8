"""Watches one run from its first step to its last: metrics, evaluations, checkpoints, callbacks, and when to stop.

It is the same for every placement: all it sees is reports, events and two counters.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qfleet.control.due import Due
from qfleet.control.growing import Growing
from qfleet.control.progress import Progress
from qfleet.control.steering import Steering
from qfleet.core.errors import CheckpointError, PartLost, QfleetError, Superseded
from qfleet.core.protocols import Placement, Scalable
from qfleet.core.saving import Saving
from qfleet.core.statistics import iqm, mean_ci95
from qfleet.core.types import Evaluated, Notice, Version, Weights
from qfleet.experiment import Experiment
from qfleet.observe.sinks import Sink

StopReason = Literal["budget", "target", "patience", "callback", "interrupt"]
Metrics = dict[str, Any]
_LONG_PAUSE_S = 0.2
"""A pause that is longer must not be held against any role."""
_ATTEND_S = 0.02
"""How often it is looked whether the last checkpoint is written."""
_LAST_TRIES = 3
"""How often the last one is made when roles die while they write it."""
INEXACT = ("accel_changed", "inexact")
"""Kinds of notices that say that a run does not go on to the byte."""


@dataclass(frozen=True)
class Callbacks:
    """A user's functions; each is given metrics and a function that stops the run after the present step."""

    on_step: Callable[[Metrics, Callable[[], None]], None] | None = None
    """After every round of work."""
    on_evaluation: Callable[[Metrics, Callable[[], None]], None] | None = None
    """After every evaluation, with its event's fields."""
    on_checkpoint: Callable[[Metrics, Callable[[], None]], None] | None = None
    """After every checkpoint, with its path."""


@dataclass
class Standing:
    """How the run stands with its evaluations; saved with it."""

    best: float | None = None
    since_best: int = 0
    in_a_row: int = 0
    solved: bool = False
    env_steps_to_target: int | None = None
    wall_s_to_target: float | None = None
    training_s: float = 0.0
    """Seconds of training in earlier parts of a resumed run, evaluations left out."""
    evaluating_s: float = 0.0
    policy_lag: float = 0.0
    """Mean over all batches."""
    envs: list[int] = field(default_factory=list)
    """How many environments each actor acts for by the balancer's orders; empty without any."""
    deadlines_ms: list[float] = field(default_factory=list)
    """Of the inference servers, by these orders."""
    actors: list[int] = field(default_factory=list)
    """Which actors are there; empty where none come and go."""
    learners: int = 0
    """How many learner ranks the run should have; 0 where they do not change."""
    shards: int = 0
    """In how many shards the replay is; 0 where that does not change."""


@dataclass
class Monitor:
    """Drives a placement until the run ends."""

    experiment: Experiment
    placement: Placement
    handles: Any
    """The program's MonitorHandles, opened."""
    sinks: Sequence[Sink]
    callbacks: Callbacks
    save: Callable[[int, Standing, Weights | None], Saving]
    """Takes the paused run for a checkpoint, which is written beside it, with the best weights if they are new."""
    standing: Standing = field(default_factory=Standing)
    stopping: StopReason | None = None
    row_bytes: float = 0.0
    """What a checkpoint has to hold of each new environment step, about."""

    def __post_init__(self) -> None:
        self._progress = Progress(self.experiment, time.perf_counter)
        self._steering = Steering(self.experiment, self.handles.orders) if self.experiment.watched else None
        self.growing: Growing | None = None
        """What has roles come and go, where they can."""
        if self.experiment.scalable and isinstance(self.placement, Scalable):
            self.growing = Growing(self.experiment, self.placement)
        capacity = self.experiment.replay.capacity
        self._due = Due(self.experiment.checkpoint, self.handles.env_steps.total(), self.row_bytes, capacity)
        self._earlier_s = self.standing.training_s
        self._evaluated_s = 0.0
        self._last_evaluated: tuple[Version, int] | None = None
        """Which weights were evaluated last, and after how many steps."""
        self._best: Weights | None = None
        """The best weights, until they are written."""
        self._saved_best: Weights | None = None
        """Those that go with the checkpoint that is being written."""
        self.saving: Saving | None = None
        """The checkpoint that is being written."""
        self.accel: str | None = None
        """How the run's updates are computed and why, once it says so."""
        self._early: dict[Any, Evaluated | Notice] = {}
        """What was heard before the run went on."""
        self._moved = False
        """Whether anything happened since the last checkpoint."""
        self._unremoved_told = False
        """Whether it was said that former checkpoints cannot be removed, since they last could."""
        self._late_told = False
        """Whether it was said that one had to wait for another that was being written."""
        self._mute: dict[int, float] = {}
        """The numbers of the sinks that cannot write now, and since when."""
        self._stood_still_s = 0.0
        """Seconds that the run has waited in the end for an earlier checkpoint."""
        self._began = time.perf_counter()

    def listen(self) -> None:
        """Hear what roles say while they are built or restored, of each kind of notice the last; `run` tells it."""
        for events in self.handles.events:
            while (message := events.receive()) is not None:
                said = (message.role, message.index, message.kind) if isinstance(message, Notice) else len(self._early)
                self._early[said] = message

    @property
    def exact(self) -> bool:
        """Whether no role has said that it does not go on to the byte."""
        return not any(isinstance(said, Notice) and said.kind in INEXACT for said in self._early.values())

    def run(self) -> StopReason:
        """Let the run go on until something ends it; returns what did. The last state is saved, or that is an error."""
        self._began = time.perf_counter()
        for message in self._early.values():
            self._heard(message)
        if self._steering is not None:
            self._steering.begin(self.standing.envs, self.standing.deadlines_ms)
        self._progress.begin(self.handles.env_steps.total(), self.handles.updates.total())
        while self.stopping is None and not self.placement.done:
            self.placement.advance()
            self._moved = True
            self._observe()
        reason = self.stopping or "budget"
        self._tell_incidents()
        self._record()
        self._save_last()
        return reason

    def stop(self, reason: StopReason = "callback") -> None:
        """End the run after the present step; safe to call from a signal handler."""
        self.stopping = self.stopping or reason

    def resume_from(self, standing: Standing) -> None:
        """Take over how an earlier part of the run stood; call after the placement was restored."""
        self.standing = standing
        self._earlier_s = standing.training_s
        self._due.begin(self.handles.env_steps.total())
        if standing.solved and self.experiment.evaluation.stop_at_target:
            self.stop("target")
        if standing.since_best >= (self.experiment.evaluation.patience or math.inf):
            standing.since_best = 0

    def counts(self) -> dict[str, int]:
        """Return how far the run is."""
        return {name: getattr(self.handles, name).total() for name in ("env_steps", "updates", "samples")}

    @property
    def elapsed_s(self) -> float:
        """Seconds since this part of the run began."""
        return time.perf_counter() - self._began

    @property
    def training_s(self) -> float:
        """Seconds of training so far; evaluations count only where they run beside training.

        What it takes in the end to write an earlier checkpoint does not count.
        """
        in_between = self._evaluated_s if self.experiment.in_turns else 0.0
        return self._earlier_s + self.elapsed_s - in_between - self._stood_still_s

    def _observe(self) -> None:
        for events in self.handles.events:
            while (message := events.receive()) is not None:
                self._heard(message)
        self._tell_incidents()
        self._balance()
        if self._progress.due(self.experiment.track.every_s):
            self._record()
        if self.callbacks.on_step is not None:
            self.callbacks.on_step({"env_steps": self.handles.env_steps.total()}, self.stop)
        if self.saving is not None and self.saving.done:
            self._written(self.saving)
        self._grow()  # between two checkpoints, also where one follows the other
        env_steps = self.handles.env_steps.total()
        if env_steps < self.experiment.env_steps and self._due.now(env_steps):  # the one at the end follows
            self._try_checkpoint()

    def _heard(self, message: Evaluated | Notice) -> None:
        if isinstance(message, Evaluated):
            self._evaluated(message)
        else:
            self._noticed(message)

    def _record(self) -> None:
        record = self._progress.record(
            self.placement.reports(), self.handles.env_steps.total(), self.handles.updates.total(), self.training_s
        )
        self.standing.policy_lag = record.get("policy_lag_mean", self.standing.policy_lag)
        self._show(lambda sink: sink.metrics(record))

    def _evaluated(self, result: Evaluated) -> None:
        if (result.version, result.env_steps) == self._last_evaluated:
            return  # an evaluator that died when it had told its result evaluates the same weights anew
        self._last_evaluated = (result.version, result.env_steps)
        self._evaluated_s += result.seconds
        self.standing.evaluating_s += result.seconds
        mean = float(result.returns.mean())
        self._judge(mean, result.env_steps)
        self._best = result.weights or self._best
        estimate = mean_ci95(result.returns, np.random.default_rng(0))
        event = {
            "event": "evaluation",
            "env_steps": result.env_steps,
            "wall_s": self.training_s,
            "mean": mean,
            "ci95": [estimate.low, estimate.high],
            "iqm": float(iqm(result.returns)),
            "episodes": len(result.returns),
            "best": result.best,
            "target": self.experiment.evaluation.target,
            "returns": result.returns.tolist(),
            "seconds": result.seconds,
        }
        self.announce(event)
        if self.callbacks.on_evaluation is not None:
            self.callbacks.on_evaluation(event, self.stop)

    def _judge(self, mean: float, env_steps: int) -> None:
        standing, config = self.standing, self.experiment.evaluation
        better = standing.best is None or mean > standing.best
        standing.best = mean if standing.best is None else max(mean, standing.best)
        standing.since_best = 0 if better else standing.since_best + 1
        if config.target is not None:
            standing.in_a_row = standing.in_a_row + 1 if mean >= config.target else 0
            if standing.in_a_row >= config.in_a_row and not standing.solved:
                standing.solved = True
                standing.env_steps_to_target, standing.wall_s_to_target = env_steps, self.training_s
                if config.stop_at_target:
                    self.stop("target")
        if config.patience is not None and standing.since_best >= config.patience:
            self.stop("patience")

    def _noticed(self, notice: Notice) -> None:
        if notice.kind == "accel":
            self.accel = notice.text
        self.announce(
            {"event": "notice", "role": notice.role, "index": notice.index, "kind": notice.kind, "text": notice.text}
        )

    def _tell_incidents(self) -> None:
        """Tell of deaths that the run survived, and of what its supervisor noticed."""
        for incident in self.placement.incidents():
            if isinstance(incident, Notice):
                self._noticed(incident)
            else:
                self.announce({"event": "restart", **dataclasses.asdict(incident)})

    def _balance(self) -> None:
        """Let the balancer look at the roles, and tell what it decides."""
        if self._steering is not None:
            env_steps = self.handles.env_steps.total()
            for event in self._steering.look(time.perf_counter(), env_steps, self.placement.reports()):
                self.announce(event)

    def _grow(self) -> None:
        """Let the elastic policy look at the run, and tell what came of it; nobody goes who still writes a part."""
        if self.growing is not None and self.saving is None:
            now = time.perf_counter()
            events = self.growing.look(now, self.handles.env_steps.total(), self.placement.reports())
            for event in events:
                self.announce(event)
            if self._steering is not None and any(event["event"] == "elastic" for event in events):
                for event in self._steering.regrouped(now):
                    self.announce(event)

    def _try_checkpoint(self) -> None:
        """Begin a checkpoint, unless one is still being written: then this one waits for it, and training does not."""
        if self.saving is not None:
            if not self._late_told:
                text = (
                    f"a checkpoint is due while that of step {self.saving.env_steps} is still being written: it is made"
                    " right after it; make checkpoint.every or checkpoint.unsaved_mb larger if that is too late"
                )
                self._noticed(Notice("monitor", 0, "late", text))
            self._late_told = True
            return
        try:
            self._begin_saving()
        except (CheckpointError, OSError) as error:
            self._not_written(error)

    def _begin_saving(self) -> Saving:
        """Take the whole run as it is now, for a checkpoint that is written while it goes on."""
        began = time.perf_counter()
        self.placement.pause()  # so that the counters say what is saved
        env_steps = self.handles.env_steps.total()
        self._due.begin(env_steps)
        self.standing.training_s = self.training_s
        if self._steering is not None:
            self.standing.envs, self.standing.deadlines_ms = self._steering.paused()
        if self.growing is not None:
            self.standing.actors, self.standing.learners, self.standing.shards = self.growing.presence()
        self._moved = False
        self._saved_best = self._best
        self.saving = self.save(env_steps, self.standing, self._best)
        if time.perf_counter() - began > _LONG_PAUSE_S:  # else who forgot each time would never see enough
            for watching in (self._steering, self.growing):
                if watching is not None:
                    watching.stood_still()
        return self.saving

    def _written(self, saving: Saving) -> None:
        """Tell of a checkpoint that is written; one that could not be is told once, and the next one tries again."""
        self.saving = None
        try:
            path = saving.path()
        except PartLost:  # its death is told, and the run can be taken again
            self._due.lose()
            self._moved = True
        except (CheckpointError, OSError) as error:
            self._not_written(error)
        else:
            self._saved(saving, path)

    def _not_written(self, error: Exception) -> None:
        if self._due.fail():
            text = (
                "a checkpoint could not be written: training goes on, the last good one stays, and it is tried"
                f" again soon; see to it that the last one can be written: {error}"
            )
            self._noticed(Notice("monitor", 0, "unsaved", text))
        self._moved = True

    def _save_last(self) -> None:
        """Have everything written that happened; an error if that is not possible."""
        if self.saving is not None:
            self.placement.pause()  # or it would train on for as long as that is written
            began = time.perf_counter()
            self._await(self.saving)
            self._stood_still_s += time.perf_counter() - began
            self._written(self.saving)
        for left in reversed(range(_LAST_TRIES)):
            if not self._moved:
                break
            saving = self._begin_saving()
            self._await(saving)
            self.saving = None
            try:
                path = saving.path()
            except PartLost:
                self._moved = True
                if not left:
                    raise
            else:
                self._saved(saving, path)
        self._tell_incidents()

    def _await(self, saving: Saving) -> None:
        """Wait until a checkpoint is written, or cannot be; the roles stand still or go on as they did."""
        while not saving.done:
            self.placement.attend(_ATTEND_S)

    def _saved(self, saving: Saving, path: Path) -> None:
        """Tell of a checkpoint that was just made."""
        if (unsaved_s := self._due.succeed()) is not None:
            text = f"checkpoints can be written again, {unsaved_s:.1f} s after they could not"
            self._noticed(Notice("monitor", 0, "saved", text))
        if saving.remarks and not self._unremoved_told:
            text = f"{'; '.join(saving.remarks)}: training goes on, and it is tried again with the next checkpoint"
            self._noticed(Notice("monitor", 0, "unremoved", text))
        self._unremoved_told = bool(saving.remarks)
        if self._best is self._saved_best:
            self._best = None
        event = {"event": "checkpoint", "env_steps": saving.env_steps, "path": path.name}
        self.announce(event)
        if self.callbacks.on_checkpoint is not None:
            self.callbacks.on_checkpoint({**event, "path": str(path)}, self.stop)

    def announce(self, event: dict[str, Any]) -> None:
        """Tell every sink of something that happened."""
        event = {"time": time.time(), "wall_s": self.training_s, **event}
        self._show(lambda sink: sink.event(event))

    def _show(self, tell: Callable[[Sink], None]) -> None:
        """Tell every sink; of one that cannot write (a full disk) the others are told: the run is worth more."""
        news = []
        for number, sink in enumerate(self.sinks):
            try:
                tell(sink)
            except Superseded:
                raise
            except QfleetError as error:
                if number not in self._mute:
                    self._mute[number] = time.perf_counter()
                    news.append(Notice("monitor", 0, "unwritten", f"training goes on, but {error}"))
            else:
                if number in self._mute:
                    seconds = time.perf_counter() - self._mute.pop(number)
                    text = (
                        f"what could not be written can be again, after {seconds:.1f} s; lines that had waited for it"
                        " are written now"
                    )
                    news.append(Notice("monitor", 0, "written", text))
        for notice in news:
            self._noticed(notice)
