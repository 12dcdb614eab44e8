"""Shows the weights of a run to others: to actors now and then, to the evaluator when it is time, and the last ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from qfleet.accel.returning import Returning
from qfleet.accel.transfers import Link
from qfleet.algo.flat import checksum
from qfleet.algo.updates import Update
from qfleet.core import history
from qfleet.core.packed import PackedWeights
from qfleet.core.protocols import Counter, Publisher, Sender
from qfleet.core.role import Idle, State
from qfleet.core.types import Bools, Ints, Version, Weights
from qfleet.parallel.packing import Packer, packed_bytes
from qfleet.parallel.packing_config import PlainWeights
from qfleet.roles.learner_setup import LearnerSetup
from qfleet.roles.weight_store import snapshot

SELDOM = 16
"""Beside other roles weights are published when so many times as long has passed as the last time took."""


@dataclass(frozen=True)
class Shown:
    """Where weights go."""

    weights: Publisher[Weights | PackedWeights]
    models: Sender[Weights]
    env_steps: Counter
    keyframes: Publisher[PackedWeights] | None = None
    """Where those go that deltas of weights are measured from; None where no such are published."""


class Publishing:
    """Publishes as a learner does: the newest weights once, models in the rhythm of evaluations."""

    def __init__(
        self,
        setup: LearnerSetup,
        update: Update,
        version: Callable[[], Version],
        shown: Shown,
        link: Link | None = None,
    ) -> None:
        """Show the networks of `update`, which are at the version that is asked for each time.

        Over a `link` weights leave the device when it comes to them, and it goes on meanwhile.
        """
        self._setup, self._update, self._version, self._shown = setup, update, version, shown
        self._link = link
        self._leaving: Returning[tuple[Version, int]] | None = None if link is None else Returning(link)
        form = setup.learner.weights
        self._packer = None if isinstance(form, PlainWeights) else Packer(form, len(update.flat.parameters))
        self._publications = self._bytes = 0
        self._evaluations_due = 0
        self._published: Version | None = None
        self._published_at, self._seconds, self._spent = -math.inf, 0.0, 0.0
        self.judged = True
        """Whether the evaluator has told the score of the model that it was last sent."""
        self.reward_scale = 1.0
        """What the rewards of the last batch were divided by."""

    def publish(self, wait: bool = True) -> bool:
        """Publish the weights unless the newest are out already, or it is too soon; return whether it did.

        Without `wait`, weights that a device is still to come to are published by a later call.
        """
        if not self.under_way and not self._due():
            return False
        began = time.monotonic()
        weights = self._snapshot() if self._leaving is None else self._left(self._leaving, wait)
        if weights is not None:
            self._send(weights)
        now = time.monotonic()
        self._spent += now - began
        if weights is None:
            return False
        self._published, self._published_at = weights.version, now
        self._seconds, self._spent = self._spent, 0.0
        return True

    @property
    def under_way(self) -> bool:
        """Whether weights are leaving the device, which a call of `publish` can pass on when they have."""
        return bool(self._leaving)

    def _due(self) -> bool:
        """Return whether weights are to be read now."""
        return self._published != self._version() and self.too_soon() <= 0

    def _snapshot(self) -> Weights:
        """Return the newest weights."""
        return snapshot(self._update.flat, self._version(), self._shown.env_steps.total())

    def _left(self, leaving: Returning[tuple[Version, int]], wait: bool) -> Weights | None:
        """Return the weights that have left the device, if any; send the newest on their way if none are.

        What the device was given before them it still has to do, so that it need not wait for us meanwhile.
        """
        if not len(leaving):
            leaving.send((self._version(), self._shown.env_steps.total()), (self._update.flat.values,))
        arrived = leaving.arrived(1 if wait else 0)
        if not arrived:
            return None
        (version, env_steps), (values,) = arrived[0]
        flat = np.asarray(values, np.float32)
        return Weights(version, flat, checksum(flat), env_steps)

    def _send(self, weights: Weights) -> None:
        """Publish weights in the form that the run wants; a keyframe is there before what is measured from it."""
        self._publications += 1
        history.note("published", weights.version.epoch, weights.version.number)
        if self._packer is None:
            self._shown.weights.publish(weights)
            self._bytes += weights.flat.nbytes
            return
        keyframe, message = self._packer.pack(weights)
        if keyframe is not None:
            assert self._shown.keyframes is not None
            self._shown.keyframes.publish(keyframe)
            self._bytes += packed_bytes(keyframe)
        self._shown.weights.publish(message)
        self._bytes += packed_bytes(message)

    def too_soon(self) -> float:
        """Return for how many seconds not to publish: it takes time, and all who read weights have work with them.

        Where roles take turns, and for actors that wait for new weights, it never is too soon.
        """
        if not self._setup.ahead or self._setup.agent.kind != "replay" or self._published == self._version():
            return 0.0
        return self._published_at + SELDOM * self._seconds - time.monotonic()

    def offer_model(self) -> bool:
        """Send a model to the evaluator when the run has passed the next multiple of the evaluation period.

        Beside other roles only when the one before it is judged: a model that waits would be an old one by its turn.
        """
        steps, models = self._shown.env_steps.total(), self._shown.models
        due = steps // self._setup.evaluate_every
        if due <= self._evaluations_due or steps >= self._setup.env_steps:
            return False
        if not models.ready() or (self._setup.ahead and not self.judged):
            return False
        self._evaluations_due, self.judged = due, False
        models.send(self._model())
        return True

    def finish(self, sent: Bools | Ints) -> Idle | None:
        """Send the last model, unless `sent` [1] says that it is; return what has to be waited for before that."""
        if not sent[0]:
            if not self._shown.models.ready():
                return Idle("the evaluator is busy", wake_on=(self._shown.models,))
            self._shown.models.send(self._model())
            self._shown.models.close()
            sent[0] = True
        return None

    def _model(self) -> Weights:
        flat = self._update.target_flat if self._setup.learner.evaluated == "target" else None
        steps = self._shown.env_steps.total()
        return snapshot(flat or self._update.flat, self._version(), steps, self.reward_scale)

    def metrics(self) -> Mapping[str, float]:
        """Return the bytes of a publication on average, keyframes included."""
        return {"weight_bytes": self._bytes / max(self._publications, 1)}

    def state_dict(self) -> State:
        """Return what was published and evaluated so far."""
        return {
            "evaluations_due": self._evaluations_due,
            "published": self._published,
            "reward_scale": self.reward_scale,
            "packer": {} if self._packer is None else self._packer.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`; what is on its way from the device is of another time."""
        if self._link is not None:
            self._leaving, self._spent = Returning(self._link), 0.0
        self._evaluations_due, self._published = state["evaluations_due"], state["published"]
        self.reward_scale = state["reward_scale"]
        if self._packer is not None:
            self._packer.load_state_dict(state.get("packer", {}))
