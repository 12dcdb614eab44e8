"""Keeps one slice of the parameters with its optimiser, and makes a step for gradients that workers send.

Receives: GradientPushes from every worker; Evaluated (latest value), for the learning rate.
Sends: its ParameterSlice (latest value) to all workers, Notices.
Waits for: the next gradient that it may take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from qfleet.algo.flat import FlatParameters, checksum
from qfleet.algo.optim import Optim
from qfleet.core.failpoints import failpoint
from qfleet.core.gradients import GradientPush, ParameterSlice
from qfleet.core.protocols import Keep, Publisher, Receiver, Sender, Subscriber
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.types import Evaluated, Floats, Notice
from qfleet.parallel.compression.build import make_codec
from qfleet.parallel.serving import add_in_order, layers_within
from qfleet.parallel.slices import cut
from qfleet.parallel.staleness import Arrivals, Rounds
from qfleet.replay.allocation import zeros
from qfleet.roles.serving_setup import ServingSetup, first_network


@dataclass(frozen=True)
class ServerHandles:
    """What a server sees of the run."""

    gradients: tuple[Receiver[GradientPush], ...]
    """One for each worker."""
    slices: Publisher[ParameterSlice]
    events: Sender[Notice] | None
    score: Subscriber[Evaluated]
    keep: Keep | None = None
    """Where its books and a snapshot outlive the server; None where nothing does."""


class ParameterServer(Role):
    """The owner of one slice of the parameters.

    Its version counts the rounds (mode sync) or gradients that it took, rejected ones included, so that all servers
    count alike. It is the run's count of updates: the learning rate follows it. A server that died goes on with its
    last snapshot under the version that it had reached.
    """

    kind = "server"

    def __init__(self, setup: ServingSetup, handles: ServerHandles) -> None:
        self._setup, self._handles = setup, handles
        keep, learner = handles.keep, setup.learner
        network = first_network(learner)[0]
        flat = FlatParameters(network)
        whole = flat.parameters
        part = cut(len(whole), setup.serving.servers)[setup.index]
        first = whole[part]
        own = (flat.untrained >= part.start) & (flat.untrained < part.stop)
        self._untrained = flat.untrained[own] - part.start
        self._flat = FlatParameters(_Slice(first))
        # Behind the slice may be a few zeros of padding.
        self._parameters, self._gradient = self._flat.parameters[: len(first)], self._flat.gradients[: len(first)]
        # The norm of a slice is not that of the gradient: workers clip.
        self._optim = Optim(learner.optim.replace(max_grad_norm=None), self._flat, learner.total_updates)
        layers = layers_within(network.parameters(), part)
        self._codec = make_codec(setup.compression, len(first), layers, torch.Generator())  # which only reads here
        allocate = zeros if keep is None else keep.array
        self._rounds = Rounds(setup.workers, allocate) if setup.serving.mode == "sync" else None
        self._books = self._rounds or Arrivals(setup.serving, setup.workers, allocate)
        rows = setup.workers if self._rounds else 0
        self._held = torch.from_numpy(allocate("held", (rows, len(first)), np.float32))
        """[W, N] the gradients of the present round, which outlive this process too."""
        self._told = -1  # the version that was published last
        self._turn = self._duplicates = self._rejected = self._lost = 0
        self._stale_sum = self._stale_most = 0
        self._kept_at = time.monotonic()
        if keep is not None and keep.life > 0:
            self._recover(keep)

    def _recover(self, keep: Keep) -> None:
        """Go on from the last snapshot of a former life."""
        kept = keep.committed()
        if kept is not None:
            self._load_slice(kept)
        made = 0 if kept is None else kept["version"]
        self._lost = self._books.version - made
        self._notice(
            "restarted",
            f"server {self._setup.index} restarted from update {made}: {self._lost} updates of its slice lost; it keeps"
            f" a snapshot every {self._setup.serving.snapshot_s:g} s",
        )

    def _commit(self) -> None:
        """Make the present slice outlive this process."""
        if self._handles.keep is not None:
            self._handles.keep.commit(self._slice_state())
        self._kept_at = time.monotonic()

    def step(self) -> Status:
        """Take what gradients have come, at most one of each worker, and publish what they made of the slice."""
        if time.monotonic() - self._kept_at >= self._setup.serving.snapshot_s:
            self._commit()
        score = self._handles.score.latest()
        if score is not None:
            self._optim.score(float(score.returns.mean()))
        received = self._receive()
        if self._rounds is not None:
            self._end_round(self._rounds)
        if self._told != self._books.version:
            self._publish()
            return WORKED
        if received:
            return WORKED
        live = self._live()
        if not live:
            self._publish(final=True)
            self._commit()
            return DONE
        awaited = [worker for worker in live if self._books.admits(worker, live)]
        reason = "no gradient" if len(awaited) == len(live) else "no gradient of the slowest worker"
        return Idle(reason, wake_on=tuple(self._handles.gradients[worker] for worker in awaited))

    def _live(self) -> list[int]:
        """Return the workers that may send more."""
        return [worker for worker, stream in enumerate(self._handles.gradients) if not stream.exhausted()]

    def _receive(self) -> int:
        """Take one gradient of each worker whose gradient may be taken; return how many messages there were."""
        received, workers, live = 0, self._setup.workers, self._live()
        for worker in (*range(self._turn, workers), *range(self._turn)):
            if not self._books.admits(worker, live):
                continue
            push = self._handles.gradients[worker].receive()
            if push is not None:
                received += 1
                self._take(push)
        self._turn = (self._turn + 1) % workers  # none is always the first
        return received

    def _take(self, push: GradientPush) -> None:
        """Use a gradient, unless it was taken before: at once, or with the others of its round."""
        worker = push.worker
        if push.sequence <= self._books.taken[worker]:
            self._duplicates += 1
            return
        row = self._gradient if self._rounds is None else self._held[worker]
        finite = self._read(push, row)
        if isinstance(self._books, Arrivals):
            staleness = max(self._books.version - push.version, 0)
            self._stale_sum += staleness
            self._stale_most = max(self._stale_most, staleness)
            if finite:
                self._make_step(self._books.factor(push.version))
        failpoint("server.before_noting")
        self._books.arrive(worker, push.sequence)
        failpoint("server.after_noting")

    def _read(self, push: GradientPush, row: Tensor) -> bool:
        """Write a gradient into a row [N]; return whether it can be used. NaN tells those that are left out."""
        if not push.payload:  # of a batch that its worker has skipped, and named
            row.fill_(math.nan)
            return False
        self._codec.add(push.payload, row.zero_())
        if self._setup.compression.kind != "none":
            row.index_fill_(0, self._untrained, 0.0)  # a sign is never zero
        finite = math.isfinite(torch.linalg.vector_norm(row).item())
        if not finite:
            row.fill_(math.nan)
            self._reject(push)
        return finite

    def _reject(self, push: GradientPush) -> None:
        """Count a gradient that is left out, and say whose it was."""
        self._rejected += 1
        text = f"gradient {push.sequence} of worker {push.worker} is not finite; server {self._setup.index} rejected it"
        self._notice("rejected_gradient", text)

    def _end_round(self, rounds: Rounds) -> None:
        """Make the round's step if a gradient of every worker that is left is here."""
        present = rounds.present()
        if not present or not set(self._live()) <= set(present):
            return
        good = [worker for worker in present if not math.isnan(self._held[worker, 0].item())]
        if good:
            add_in_order(self._held, good, self._gradient)
            self._make_step(1.0)
        rounds.close()

    def _make_step(self, factor: float) -> None:
        """Make one step along the gradient; multiply the step, not the gradient, whose size Adam would not heed."""
        before = self._parameters.clone() if factor < 1 else None
        self._optim.step(self._books.version)
        if before is not None:
            torch.lerp(before, self._parameters, factor, out=self._parameters)

    def _publish(self, final: bool = False) -> None:
        values: Floats = self._parameters.numpy().copy()
        self._handles.slices.publish(
            ParameterSlice(
                server=self._setup.index,
                version=self._books.version,
                values=values,
                checksum=checksum(values),
                taken=self._books.taken.copy(),
                learning_rate=self._optim.learning_rate,
                final=final,
            )
        )
        self._told = self._books.version

    def _notice(self, kind: str, text: str) -> None:
        if self._handles.events is not None and self._handles.events.ready():
            self._handles.events.send(Notice(self.kind, self._setup.index, kind, text))

    def metrics(self) -> Mapping[str, float]:
        """Return how far the slice is, and how old the gradients were."""
        gradients = max(int(self._books.taken.sum()), 1)
        return {
            "version": float(self._books.version),
            "learning_rate": self._optim.learning_rate,
            "gradients": float(self._books.taken.sum()),
            "staleness_mean": self._stale_sum / gradients,
            "staleness_most": float(self._stale_most),
            "rejected_gradients": float(self._rejected),
            "duplicate_gradients": float(self._duplicates),
            "lost_updates": float(self._lost),
        }

    def state_dict(self) -> State:
        """Return the slice, its optimiser, the books and the gradients of the present round."""
        self._commit()
        counts = [self._turn, self._duplicates, self._rejected, self._lost, self._stale_sum, self._stale_most]
        return {
            "slice": self._slice_state(),
            "books": self._books.state_dict(),
            "held": self._held.clone(),
            "told": self._told,
            "counts": counts,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue."""
        self._load_slice(state["slice"])
        self._books.load_state_dict(state["books"])
        self._held.copy_(state["held"])
        self._told = state["told"]
        self._turn, self._duplicates, self._rejected, self._lost, self._stale_sum, self._stale_most = state["counts"]
        self._commit()

    def _slice_state(self) -> State:
        """Return what a step changes."""
        return {
            "version": self._books.version,
            "parameters": self._flat.to_numpy(),
            "optim": self._optim.state_dict(),
        }

    def _load_slice(self, state: State) -> None:
        self._flat.load_numpy(state["parameters"])
        self._optim.load_state_dict(state["optim"])


class _Slice(nn.Module):
    """A part of the parameters as a network of its own, for the optimiser."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())
