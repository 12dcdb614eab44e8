"""Turns batches into gradients for the parameter servers, and takes the weights that they make of them.

Receives: Batches from the replay shards; ParameterSlices from every server and Evaluated (latest values).
Sends: GradientPushes to every server, Priorities to the replay shards, Notices; the first worker also Weights (latest
    value) to the actors and Weights to the evaluator.
Waits for: the next batch, or the weights that have its last gradient in them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from qfleet.accel.choices import CHANGED
from qfleet.accel.precision import set_deterministic
from qfleet.algo.updates import UpdateResult
from qfleet.core.errors import QfleetError
from qfleet.core.gradients import GradientPush, ParameterSlice
from qfleet.core.packed import PackedWeights
from qfleet.core.protocols import Counter, Keep, Publisher, Receiver, Sender, Subscriber
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.types import (
    Batch,
    Bools,
    Evaluated,
    Notice,
    Priorities,
    Rollout,
    SequenceBatch,
    Version,
    Weights,
)
from qfleet.parallel.devices import own_device
from qfleet.replay.allocation import zeros
from qfleet.roles.feed import Feed, Learnable, Turns
from qfleet.roles.lag import PolicyLag
from qfleet.roles.publishing import Publishing, Shown
from qfleet.roles.remote_learning import build_remote_learning
from qfleet.roles.server_link import ServerLink
from qfleet.roles.serving_setup import ServingSetup

_SOONEST_S, _LATEST_S = 2e-4, 0.05
"""How soon and how late a worker looks again whether the servers have answered: nothing wakes it."""
_PATIENCE = 8
"""A worker looks again after so small a part of the time that it has waited."""


@dataclass(frozen=True)
class WorkerHandles:
    """What a worker sees of the run; workers other than the first publish nothing."""

    batches: tuple[Receiver[Batch | SequenceBatch | Rollout], ...]
    priorities: tuple[Sender[Priorities], ...]
    """One for each shard; none for uniform sampling."""
    gradients: tuple[Sender[GradientPush], ...]
    """One for each server."""
    slices: tuple[Subscriber[ParameterSlice], ...]
    """One for each server, in the same order."""
    weights: Publisher[Weights | PackedWeights] | None
    models: Sender[Weights] | None
    events: Sender[Notice] | None
    score: Subscriber[Evaluated]
    env_steps: Counter
    updates: Counter
    """Updates of the run; the first worker counts."""
    keep: Keep | None = None
    """Where a gradient on its way, and states, outlive the worker; None where nothing does."""
    keyframes: Publisher[PackedWeights] | None = None
    """Where keyframes of the weights go; None where weights are published without."""


class GradientWorker(Role):
    """One of the workers that compute gradients side by side."""

    kind = "worker"

    def __init__(self, setup: ServingSetup, handles: WorkerHandles) -> None:
        if setup.learner.ahead:  # else all take turns, perhaps in one process
            own = replace(setup.learner, device=own_device(setup.learner.device, setup.index))
            setup = replace(setup, learner=own)
        self._setup, self._handles = setup, handles
        keep, allocate = handles.keep, zeros if handles.keep is None else handles.keep.array
        self._feed = Feed(handles.batches, handles.priorities, setup.learner.shards, setup.learner.max_decay)
        self._learning = build_remote_learning(setup)
        self._update, self._step = self._learning.update, self._learning.step
        ends = (handles.gradients, handles.slices)
        self._link = ServerLink(setup, self._update.online, self._update.flat, ends, allocate)
        self._sent: Bools = allocate("sent", (1,), np.bool_)  # whether the last model was
        self._turns: Turns = allocate("turns", (2, 2, len(handles.batches)), np.float64)
        """How the shards' turns stood after the last gradient and the one before, each at its number modulo 2."""
        self._publishing: Publishing | None = None
        if handles.weights is not None and handles.models is not None:
            shown = Shown(handles.weights, handles.models, handles.env_steps, handles.keyframes)
            self._publishing = Publishing(setup.learner, self._update, self._version, shown)
            for kind, text in self._learning.notices.items():
                self._notice(kind, text)
        self._unsent: deque[Priorities] = deque()
        self._batches_seen = self._skips = self._skipped = self._epoch = 0
        self._lag = PolicyLag()
        self._latest: dict[str, torch.Tensor] = {}
        self._waits_since: float | None = None
        self._kept_at = time.monotonic()
        if keep is not None and keep.life > 0:
            self._recover(keep)

    def _recover(self, keep: Keep) -> None:
        """Begin with the last state that a former life kept, under a new epoch; the servers have the weights."""
        kept = keep.committed() or {"life": 0, "state": None}
        if kept["state"] is not None:
            self._load(kept["state"])
        if self._link.source is not None:
            self._feed.resume_after(*self._link.source, self._turns[self._link.sequence % 2])
        self._epoch += keep.life - kept["life"]
        self._notice(
            "restarted", f"worker {self._setup.index} restarted; it goes on after its gradient {self._link.sequence}"
        )

    def _commit(self) -> None:
        """Make the present state outlive this process, but for the line to the servers, which does by itself."""
        if self._handles.keep is not None:
            self._handles.keep.commit({"life": self._handles.keep.life, "state": self._state()})
        self._kept_at = time.monotonic()

    def step(self) -> Status:
        """Take new weights, then compute and send one gradient, or else publish what is new."""
        if time.monotonic() - self._kept_at >= self._setup.learner.learner.snapshot_s:
            self._commit()
        if self._handles.score.latest() is not None and self._publishing is not None:
            self._publishing.judged = True
        self._pull()
        if self._publishing is not None and self._publishing.offer_model():
            return WORKED
        while self._unsent and self._feed.has_room(self._unsent[0].shard):
            self._feed.write_back(self._unsent.popleft())
        if full := self._feed.full():
            return Idle("replay has not taken the priorities", wake_on=full)
        if not self._link.flush():
            return Idle("a server has not taken the last gradient", wake_on=self._link.full)
        if not self._link.settled:
            return self._wait("the servers have not answered")
        self._waits_since = None
        message = self._feed.receive()
        if message is not None:
            self._learn(message)
            return WORKED
        return self._rest()

    def _pull(self) -> None:
        """Load newer weights if there are any; let the target network follow, count, and publish when that is due."""
        before, period = self._step.count, self._setup.learner.learner.publish_period
        if not self._link.pull():
            return
        self._step.arrive(self._link.version, self._link.learning_rate)
        if self._publishing is not None:
            counter = self._handles.updates
            counter.add(self._step.count - counter.own())
            if self._step.count // period > before // period:
                self._publishing.publish()

    def _learn(self, message: Learnable) -> None:
        """Compute the gradient of one batch and send it; the priorities go back to its shard."""
        assert not isinstance(message, Rollout)
        if message.version.epoch == self._epoch:  # numbers of two epochs cannot be compared
            self._lag.add(self._step.count - message.version.number)
        self._batches_seen += 1
        if self._publishing is not None:
            self._publishing.reward_scale = message.reward_scale
        result = self._update(message)
        self._latest = result.metrics
        if result.updates or self._setup.serving.mode == "sync":  # the others of a round would wait for ever
            self._turns[(self._link.sequence + 1) % 2] = self._feed.turns
            gradient = self._update.flat.gradients if result.updates else None
            self._link.push(gradient, (message.shard, message.draw))
        if self._handles.priorities and result.priority is not None:
            self._unsent.append(Priorities(message.index, message.generation, result.priority, message.shard))
        self._guard(result)
        while self._unsent and self._feed.has_room(self._unsent[0].shard):
            self._feed.write_back(self._unsent.popleft())

    def _guard(self, result: UpdateResult) -> None:
        """Name every batch without a finite gradient; give up after several in a row that no loss scale explains.

        A round of mode sync is made without its part; else the next batch takes its place.
        """
        if not result.skipped:
            self._skips = 0
            return
        self._skipped += 1
        choices = self._learning.choices
        self._skips += choices is None or not choices.forgiven()
        if self._skips >= self._setup.learner.learner.skips:
            raise QfleetError(
                f"{self._skips} gradients of worker {self._setup.index} in a row were not finite (NaN or infinity), the"
                f" last at update {self._step.count}. The last good checkpoint is kept."
                " Lower optim.lr, set optim.max_grad_norm, or check the rewards."
            )
        update, worker = self._step.count + 1, self._setup.index
        text = f"update {update}: the loss or its gradient is not finite; worker {worker} skipped the batch"
        self._notice("skipped_update", text)

    def _rest(self) -> Status:
        """Without a batch: publish what is new, end when none will come, else wait for one."""
        publishing = self._publishing
        wait = 0.0 if publishing is None else publishing.too_soon()
        if publishing is not None and publishing.publish():
            return WORKED
        if self._feed.exhausted():
            return self._finish()
        # Others make new versions meanwhile, which the first worker publishes.
        watching = self._setup.learner.ahead and publishing is not None and self._setup.serving.mode != "sync"
        deadline = _LATEST_S if watching else None
        return Idle("no batch", wake_on=self._feed.awaited, deadline=wait if wait > 0 else deadline)

    def _finish(self) -> Status:
        """Leave the servers; the first worker has the weights evaluated that all have made, then ends too."""
        self._link.close()
        if self._publishing is not None:
            if not self._link.ended:
                return self._wait("other workers have not finished")
            if (busy := self._publishing.finish(self._sent)) is not None:
                return busy
        self._commit()
        return DONE

    def _wait(self, reason: str) -> Status:
        """Wait for newer slices: for a while in proportion to how long that has lasted, since nothing wakes a role."""
        if not self._setup.learner.ahead:  # roles take turns
            return Idle(reason, wake_on=self._link.awaited)
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        pause = min(max((now - self._waits_since) / _PATIENCE, _SOONEST_S), _LATEST_S)
        return Idle(reason, wake_on=self._link.awaited, deadline=pause)

    def _notice(self, kind: str, text: str) -> None:
        if self._handles.events is not None and self._handles.events.ready():
            self._handles.events.send(Notice(self.kind, self._setup.index, kind, text))

    def _version(self) -> Version:
        """Weights are numbered by the updates that made them."""
        return Version(self._epoch, self._step.count)

    def metrics(self) -> Mapping[str, float]:
        """Return the last gradient's numbers; reading them waits for the device."""
        values = {name: float(value) for name, value in self._latest.items()}
        return {
            **values,
            "updates": float(self._step.count),
            "gradients": float(self._link.sequence),
            "gradient_bytes": self._link.bytes_sent / max(self._link.sequence, 1),
            "learning_rate": self._step.learning_rate,
            "skipped_updates": float(self._skipped),
            **self._lag.metrics(self._batches_seen),
            **({} if self._publishing is None else self._publishing.metrics()),
        }

    def state_dict(self) -> State:
        """Return networks, random numbers, counters, and what is on its way to and from the servers."""
        self._commit()
        return {**self._state(), "link": self._link.state_dict()}

    def _state(self) -> State:
        return {
            "update": self._update.state_dict(),
            "counters": [self._batches_seen, self._skips, self._skipped, self._lag.total, self._epoch],
            "recent_lag": self._lag.recent(),
            "publishing": None if self._publishing is None else self._publishing.state_dict(),
            "settings": self._settings,
            "feed": self._feed.state_dict(),
            "unsent": list(self._unsent),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue."""
        self._load(state)
        if "link" in state:
            self._link.load_state_dict(state["link"])
        else:  # others learned before it
            self._link.begin_after(state["sequence"])
        self._turns[self._link.sequence % 2] = self._feed.turns
        self._commit()

    def _load(self, state: State) -> None:
        self._update.load_state_dict(state["update"])
        self._batches_seen, self._skips, self._skipped, lag_sum, self._epoch = state["counters"]
        self._lag.load(lag_sum, state.get("recent_lag", ()))
        if self._publishing is not None:
            self._publishing.load_state_dict(state["publishing"])
        self._feed.load_state_dict(state["feed"])
        self._unsent = deque(state["unsent"])
        if self._learning.choices is not None and self._learning.choices.differ_from(state["settings"]):
            self._notice("accel_changed", CHANGED)

    @property
    def _settings(self) -> dict[str, Any]:
        """How gradients are computed, as it is saved."""
        return {} if self._learning.choices is None else self._learning.choices.fingerprint

    def close(self) -> None:
        """Give the process's switches back."""
        set_deterministic(False)
