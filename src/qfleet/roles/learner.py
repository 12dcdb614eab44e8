"""Turns batches into better weights: the only role that changes the network.

Receives: Batches from the replay shards, or Rollouts from actors; Evaluated (latest value).
Sends: Weights (latest value), or PackedWeights and their keyframes, to the actors, Weights to the evaluator,
    Priorities to the replay shards, Notices.
Waits for: the next batch.
"""

from __future__ import annotations

import math
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
from qfleet.core.packed import PackedWeights
from qfleet.core.protocols import Counter, Keep, KeptRows, Publisher, Receiver, Sender, Subscriber
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.types import (
    Batch,
    Evaluated,
    Ints,
    Notice,
    Priorities,
    Rollout,
    SequenceBatch,
    Version,
    Weights,
)
from qfleet.roles.feed import Feed
from qfleet.roles.joining import MEETING_S, Joining, meet_group, placed
from qfleet.roles.lag import PolicyLag
from qfleet.roles.learner_setup import LearnerSetup
from qfleet.roles.learning import build_learning
from qfleet.roles.publishing import Publishing, Shown
from qfleet.roles.updating import Message

NO_BATCH = "no batch"
"""What a learner waits for that has used up all that came, as its reports say."""


@dataclass(frozen=True)
class LearnerHandles:
    """What a learner sees of the run; ranks other than the first publish nothing."""

    batches: tuple[Receiver[Batch | SequenceBatch | Rollout], ...]
    priorities: tuple[Sender[Priorities], ...]
    """One for each shard; none for uniform sampling."""
    weights: Publisher[Weights | PackedWeights] | None
    models: Sender[Weights] | None
    events: Sender[Notice | Evaluated] | None
    score: Subscriber[Evaluated]
    env_steps: Counter
    updates: Counter
    """Updates of the run; the first rank counts."""
    keep: Keep | None = None
    """Where states outlive the learner; None where nothing does."""
    rows: KeptRows | None = None
    """The shard's memory, where the learner has a copy of its observations; None where batches have them."""
    keyframes: Publisher[PackedWeights] | None = None
    """Where keyframes of the weights go; None where weights are published without."""


class Learner(Role):
    """One rank of the run's learner group; usually the only one."""

    kind = "learner"

    def __init__(self, setup: LearnerSetup, handles: LearnerHandles) -> None:
        setup = placed(_as_left(setup, handles.keep))
        self._setup, self._handles = setup, handles
        self._joining = _join(setup, handles.keep.life if handles.keep else 0)
        company = None if self._joining is None else self._joining.company
        self._feed = Feed(handles.batches, handles.priorities, setup.shards, setup.max_decay, company)
        self._learning = build_learning(setup, self.kind, self._joining)
        for kind, text in self._learning.notices.items():
            self._notice(kind, text)
        if handles.rows is not None:
            self._learning.look_at(handles.rows, setup, whole=handles.keep is not None and handles.keep.life > 0)
        self._update, self._choices = self._learning.update, self._learning.choices
        self._updating = self._learning.updating(setup)
        self._unsent: deque[Priorities] = deque()
        """What the replay shard has no room for yet; empty where every update is waited for."""
        self._batches_seen = self._updates = self._skips = self._skipped = 0
        self._forgiven = self._met = self._skips_told = 0
        self._lag = PolicyLag()
        self._drawn = (0, 0)
        """The shard and the number of the draw that was learned from last."""
        self._reward_scale = 1.0
        self._latest: dict[str, torch.Tensor] = {}
        self._publishing: Publishing | None = None
        if handles.weights is not None and handles.models is not None:
            shown = Shown(handles.weights, handles.models, handles.env_steps, handles.keyframes)
            self._publishing = Publishing(setup, self._update, lambda: self._version, shown, self._learning.link)
        self._epoch = 0
        self._ended = False
        self._kept_at = time.monotonic()
        keep = handles.keep
        self._far: Ints = np.zeros(2, np.int64) if keep is None else keep.array("far", (2,), np.int64)
        """How many updates any life has made, and whether the last model was sent."""
        if keep is not None and keep.life > 0:
            self._recover(keep)

    def _recover(self, keep: Keep) -> None:
        """Begin with the last state that a former life kept, as a new epoch of the weights."""
        kept = keep.committed()
        if self._joining is not None:
            kept = self._joining.shared(kept)
            self._feed.realign()
        kept = kept or {"life": 0, "state": None}
        if kept["state"] is not None:
            self._load(kept["state"])
        self._epoch += keep.life - kept["life"]
        self._commit()
        lost = int(self._far[0]) - self._updates
        self._far[0] = self._updates
        if self._handles.weights is not None:
            self._handles.updates.add(-lost)
        size = 0 if self._setup.group is None else self._setup.group.size
        ranks = f", {size} rank{'s' if size > 1 else ''}" if size else ""
        if keep.planned and not lost:
            self._notice("regrouped", f"learner goes on from update {self._updates}; epoch {self._epoch}{ranks}")
            return
        text = f"learner restarted from update {self._updates}: {lost} updates lost; epoch {self._epoch}{ranks}"
        self._notice("restarted", text)

    def _commit(self) -> State:
        """Make the present state outlive this process; return it."""
        self._account(math.inf)
        state = self._state()
        if self._handles.keep is not None and self._first:
            self._handles.keep.commit({"life": self._handles.keep.life, "state": state})
        self._kept_at = time.monotonic()
        return state

    def step(self) -> Status:
        """Do one update, or else publish what is new."""
        if self._joining is None and self._commit_due():
            self._commit()
        score = self._handles.score.latest()
        if score is not None:
            self._update.score(float(score.returns.mean()))
            if self._publishing is not None:
                self._publishing.judged = True
        if self._publishing is not None and self._publishing.offer_model():
            return WORKED
        self._account()
        self._send_priorities()
        if full := self._feed.full():
            return Idle("replay has not taken the priorities", wake_on=full)
        message = self._feed.receive()
        if message is not None or self._updating.waiting:
            self._learn(message)
            return WORKED
        if self._account(1):  # with nothing else to do, wait for the device: no longer, or it would run out of work
            self._send_priorities()
            return WORKED
        wait = 0.0 if self._publishing is None else self._publishing.too_soon()  # first: it may be over meanwhile
        if self._publish(wait=True):
            return WORKED
        if self._feed.exhausted():
            return self._finish()
        return Idle(NO_BATCH, wake_on=self._feed.awaited, deadline=wait if wait > 0 else None)

    def _learn(self, message: Message | None) -> None:
        """Take a message, if one came, and learn from this or the one before; publish when that is due."""
        before, period = self._batches_seen, self._setup.learner.publish_period
        self._advance(message)
        self._account()
        self._send_priorities()
        if self._batches_seen // period > before // period:
            self._meet()
            self._publish(wait=False)
            if self._joining is not None and self._joining.agreed(self._commit_due()):
                self._commit()
        elif self._publishing is not None and self._publishing.under_way:
            self._publish(wait=False)

    def _meet(self) -> None:
        """Be one with the other ranks; all of them come here after the same update."""
        if self._joining is not None:
            self._joining.meet(self._update, self._batches_seen, self._drawn)
            if self._joining.apart:
                self._name_skips(self._joining)
        self._met = self._batches_seen

    def _name_skips(self, joining: Joining) -> None:
        """Name the updates that other ranks skipped since the last meeting: only the first can tell of them."""
        before, self._skips_told = self._skips_told, self._skipped
        for rank, count in joining.skipped_apart(self._skipped - before).items():
            text = f"{count} updates of learner {rank} before update {self._batches_seen} were not finite: skipped"
            self._notice("skipped_update", text)

    def _publish(self, wait: bool) -> bool:
        """Publish the weights unless that is not due, or they are in pieces until the ranks meet again.

        Without `wait` they may be on their way from the device, and are published the next time.
        """
        in_pieces = self._setup.parallel.in_pieces and self._met < self._batches_seen
        return self._publishing is not None and not in_pieces and self._publishing.publish(wait)

    def _commit_due(self) -> bool:
        """Return whether the last state that was kept is old."""
        kept = self._handles.keep is not None
        return kept and time.monotonic() - self._kept_at >= self._setup.learner.snapshot_s

    @property
    def _first(self) -> bool:
        """Whether this rank speaks for the group, whose states are all the same."""
        return self._setup.group is None or self._setup.group.rank == 0

    def _advance(self, message: Message | None) -> None:
        """Take a message, if one came; learn from it or the one before."""
        learned = self._updating.advance(message)
        if learned is None:
            return
        batches = learned.updates if isinstance(learned, Batch) else 1
        if learned.version.epoch == self._epoch:  # numbers of two epochs cannot be compared
            self._lag.add(self._version.number - learned.version.number, batches)
        self._batches_seen += batches
        if isinstance(learned, Batch | SequenceBatch):
            self._reward_scale, self._drawn = learned.reward_scale, (learned.shard, learned.draw)
            if self._publishing is not None:
                self._publishing.reward_scale = learned.reward_scale

    def _account(self, least: float = 0) -> bool:
        """Count the updates of messages whose outcome is known, and wait for `least`; return whether there were any."""
        finished = self._updating.finished(least)
        for message, result in finished:
            self._updates += result.updates
            self._far[0] = self._updates
            self._latest = result.metrics
            if self._handles.weights is not None:
                self._handles.updates.add(result.updates)
            if isinstance(message, Batch | SequenceBatch) and self._handles.priorities and result.priority is not None:
                self._unsent.append(Priorities(message.index, message.generation, result.priority, message.shard))
            self._guard(result)
        return bool(finished)

    def _send_priorities(self) -> None:
        while self._unsent and self._feed.has_room(self._unsent[0].shard):
            self._feed.write_back(self._unsent.popleft())

    def _guard(self, result: UpdateResult) -> None:
        """Name every skipped update; give up after several in a row that no loss scale is to blame for."""
        self._skipped += result.skipped
        if not result.skipped or result.updates:
            self._skips = 0
        if not result.skipped:
            return
        if self._choices is not None:
            self._forgiven += self._choices.forgiven()  # perhaps for updates too that are still to be accounted for
        # Those that were made divide the others into rows, of which one has its share at least, wherever it was.
        self._skips += math.ceil(max(result.skipped - self._forgiven, 0) / (result.updates + 1))
        self._forgiven = max(self._forgiven - result.skipped, 0)
        text = f"update {self._updates + 1}: the loss or its gradient is not finite; the update was skipped"
        if self._joining is not None and (ranks := self._joining.blamed()):
            text += f" (learner {', '.join(map(str, ranks))})"
        if self._skips >= self._setup.learner.skips:
            raise QfleetError(
                f"{self._skips} updates in a row were not finite (NaN or infinity), the last one update"
                f" {self._updates + 1}. The last good checkpoint is kept."
                " Lower optim.lr, set optim.max_grad_norm, or check the rewards."
            )
        self._notice("skipped_update", text)

    def _notice(self, kind: str, text: str) -> None:
        if self._handles.events is not None and self._handles.events.ready():
            self._handles.events.send(Notice(self.kind, 0, kind, text))

    @property
    def _version(self) -> Version:
        """Weights are numbered by the batches that made them."""
        return Version(self._epoch, self._batches_seen)

    def _finish(self) -> Status:
        """Have the last weights evaluated too, then end."""
        if not self._ended:
            self._meet()
            self._commit()  # or a death from here on would cost the last updates
            self._ended = True
        busy = None if self._publishing is None else self._publishing.finish(self._far[1:])
        return busy or DONE

    def metrics(self) -> Mapping[str, float]:
        """Return the last update's numbers; reading them waits for the device."""
        values = {name: float(value) for name, value in self._latest.items()}
        return {
            **values,
            "updates": float(self._updates),
            "learning_rate": self._update.learning_rate,
            "skipped_updates": float(self._skipped),
            **self._lag.metrics(self._batches_seen),
            "reward_scale": self._reward_scale,
            **({} if self._joining is None else self._joining.metrics()),
            **({} if self._publishing is None else self._publishing.metrics()),
        }

    def state_dict(self) -> State:
        """Return networks, optimiser, schedules and counters, which a later life begins with, too.

        Learns from what is on its way to the device first: the streams, which are saved too, no longer have it.
        """
        while self._updating.waiting:
            self._advance(None)
        return self._commit()

    def _state(self) -> State:
        nothing: State = {"evaluations_due": 0, "published": None, "packer": {}}
        shown = nothing if self._publishing is None else self._publishing.state_dict()
        return {
            "update": self._update.state_dict(),
            "counters": [self._batches_seen, self._updates, self._skips, self._skipped, shown["evaluations_due"]],
            "published": shown["published"],
            "packer": shown["packer"],
            "lag_sum": self._lag.total,
            "recent_lag": self._lag.recent(),
            "reward_scale": self._reward_scale,
            "settings": self._settings,
            "epoch": self._epoch,
            "feed": self._feed.state_dict(),
            "unsent": list(self._unsent),
            "joining": {} if self._joining is None else self._joining.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue."""
        self._load(state)
        self._feed.realign()  # a group that was smaller when it was saved left draws that were cut for it
        if self._learning.mirror is not None:
            self._learning.mirror.renew()  # the shard was restored too
        self._far[0] = self._updates
        self._commit()

    def _load(self, state: State) -> None:
        joining, saved = self._joining, state["update"]
        self._update.load_state_dict(saved if joining is None else joining.adapted(saved))
        self._batches_seen, self._updates, self._skips, self._skipped, due = state["counters"]
        self._skips_told = self._skipped
        self._lag.load(state["lag_sum"], state.get("recent_lag", ()))
        self._epoch = state.get("epoch", 0)
        self._reward_scale = state["reward_scale"]
        if self._publishing is not None:
            shown = {"evaluations_due": due, "published": state["published"], "reward_scale": self._reward_scale}
            self._publishing.load_state_dict({**shown, "packer": state.get("packer", {})})
        if "feed" in state:  # older checkpoints have none
            self._feed.load_state_dict(state["feed"])
        if joining is not None:
            joining.load_state_dict(state.get("joining", {}))
        self._updating, self._unsent = self._learning.updating(self._setup), deque(state.get("unsent", ()))
        if self._choices is not None and self._choices.differ_from(state.get("settings", {})):
            self._notice("accel_changed", CHANGED)

    @property
    def _settings(self) -> dict[str, Any]:
        """How updates are computed, as it is saved."""
        return {} if self._choices is None else self._choices.fingerprint

    def close(self) -> None:
        """Leave the learner group, and give the process's switches back."""
        set_deterministic(False)
        if self._joining is not None:
            self._joining.close()


def _as_left(setup: LearnerSetup, keep: Keep | None) -> LearnerSetup:
    """Return the setup of a group without those who are not there, the last ones, and with the place where it meets."""
    group = setup.group
    if group is None or keep is None:
        return setup
    return replace(
        setup, group=replace(group, size=group.size - keep.gone, rendezvous=keep.meeting or group.rendezvous)
    )


def _join(setup: LearnerSetup, life: int) -> Joining | None:
    """Meet the other ranks, if there are any; in each life of the group at another place."""
    if setup.group is None:
        return None
    place, parallel, group = setup.group, setup.parallel, meet_group(setup.group, life, setup.device)
    if not parallel.in_pieces:
        return Joining(parallel, group, setup.seed)
    from qfleet.parallel.mesh import Degrees, Mesh  # which loads much of torch that few runs need

    degrees = Degrees(place.size // parallel.split, parallel.pipeline, parallel.tensor)
    where = f"{place.rendezvous}-{life}-mesh"
    mesh = Mesh(degrees, place.rank, place.size, where, setup.device, MEETING_S)
    return Joining(parallel, group, setup.seed, mesh)
