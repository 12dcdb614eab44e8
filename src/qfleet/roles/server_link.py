"""A worker's line to the parameter servers: one gradient at a time goes out in slices, slices of weights come in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from qfleet.algo.flat import FlatParameters, checksum
from qfleet.algo.networks import QNetwork
from qfleet.core import seeding
from qfleet.core.errors import CheckpointError, QfleetError
from qfleet.core.failpoints import failpoint
from qfleet.core.gradients import GradientPush, ParameterSlice
from qfleet.core.protocols import Sender, Subscriber
from qfleet.core.role import State
from qfleet.core.types import Ints
from qfleet.parallel.compression.build import make_compressor
from qfleet.parallel.compression.codec import payload_bytes
from qfleet.parallel.compression.feedback import Compressor
from qfleet.parallel.serving import layers_within
from qfleet.parallel.slices import cut
from qfleet.parallel.staleness import Allocate
from qfleet.roles.serving_setup import ServingSetup


class ServerLink:
    """Sends slices of gradients and loads slices of weights.

    The next gradient is computed when the last one is in the weights of every server. In mode sync the slices are
    loaded only when all have the same version: while this worker's next gradient is missing no server can go beyond
    it, so that version is the newest of each. In the other modes the newest of each is loaded.

    The gradient on its way lies in memory that can outlive the worker: a new life sends it again, so that every server
    takes the same gradient under its number, whichever of them had it before. Beside it lies which batch it was made
    of: a new life, which is given that batch again if the former one had not acknowledged it, leaves it out. What
    compression still owes is lost.
    """

    def __init__(
        self,
        setup: ServingSetup,
        network: QNetwork,
        flat: FlatParameters,
        ends: tuple[tuple[Sender[GradientPush], ...], tuple[Subscriber[ParameterSlice], ...]],
        allocate: Allocate,
    ) -> None:
        """Take the ends of the streams to the servers and of their slices, in the order of servers."""
        self._worker, self._sync, self._flat = setup.index, setup.serving.mode == "sync", flat
        self._pushes, self._subscribers = ends
        size, servers = len(flat.parameters), len(self._pushes)
        self._cuts, self._form = cut(size, servers), setup.compression.kind
        self._compressors = [
            _compressor(setup, server, part, network.parameters()) for server, part in enumerate(self._cuts)
        ]
        self.bytes_sent = 0
        """Bytes of all gradients as they were sent."""
        self._slices: list[ParameterSlice | None] = [None] * servers
        self._loaded = [-1] * servers  # versions
        self._outgoing = torch.from_numpy(allocate("gradient", (size,), np.float32))
        self._marks: Ints = allocate("marks", (1 + servers,), np.int64)
        """How many gradients were made, and the versions of the slices that the last one was computed at."""
        self._origin: Ints = allocate("origin", (4,), np.int64)
        """A gradient's number, the shard and the draw of its batch, and whether that gave none."""
        self._unsent = list(range(servers)) if self.sequence else []
        cuda = flat.parameters.is_cuda
        self._landing = torch.empty(size, pin_memory=cuda) if flat.parameters.device.type != "cpu" else flat.parameters

    @property
    def sequence(self) -> int:
        """How many gradients were made."""
        return int(self._marks[0])

    @property
    def source(self) -> tuple[int, int] | None:
        """The shard and the draw of the batch that the last gradient was made of; None before the first.

        A life that died while it wrote these down made no gradient of them.
        """
        number, shard, draw, _ = self._origin.tolist()
        return (shard, draw) if number and number == self.sequence else None

    @property
    def version(self) -> int:
        """The version of the weights that are loaded: that of the slice which is furthest behind."""
        return min(self._loaded)

    @property
    def learning_rate(self) -> float:
        """That of the servers' last steps."""
        return max((piece.learning_rate for piece in self._slices if piece is not None), default=0.0)

    @property
    def settled(self) -> bool:
        """Whether the last gradient is in the weights that are loaded, so that the next can be computed."""
        taken = all(piece is not None and piece.taken[self._worker] >= self.sequence for piece in self._slices)
        return taken and not self._unsent and self._loaded == [p.version for p in self._slices if p is not None]

    @property
    def ended(self) -> bool:
        """Whether no worker will send any further gradient; once settled, the weights are those that all have made."""
        return all(piece is not None and piece.final for piece in self._slices)

    @property
    def full(self) -> tuple[Sender[GradientPush], ...]:
        """The streams that have no room for what is still to be sent."""
        return tuple(self._pushes[server] for server in self._unsent)

    @property
    def awaited(self) -> tuple[Subscriber[ParameterSlice], ...]:
        """What new weights come from."""
        return self._subscribers

    def pull(self) -> bool:
        """Look for newer slices, load them if they may be used; return whether newer weights are loaded."""
        for server, subscriber in enumerate(self._subscribers):
            piece = subscriber.latest()
            if piece is None:
                continue
            if checksum(piece.values) != piece.checksum:
                raise QfleetError(f"the slice {piece.version} of server {server} arrived damaged: its checksum differs")
            self._slices[server] = piece
            if server in self._unsent and piece.taken[self._worker] >= self.sequence:
                self._unsent.remove(server)  # a former life had sent it
        pieces = [piece for piece in self._slices if piece is not None]
        versions = [piece.version for piece in pieces]
        if len(pieces) < len(self._slices) or versions == self._loaded or (self._sync and len(set(versions)) > 1):
            return False
        for part, piece in zip(self._cuts, pieces, strict=True):
            np.copyto(self._landing.numpy()[part], piece.values)
        if self._landing is not self._flat.parameters:
            self._flat.parameters.copy_(self._landing)
        self._loaded = versions
        return True

    def push(self, gradient: Tensor | None, source: tuple[int, int]) -> None:
        """Take the gradient [P] of the weights that are loaded, and send what there is room for.

        `source` is the shard and the draw of the batch that it was made of, None the gradient of one that gave none.
        """
        if gradient is not None:
            self._outgoing.copy_(gradient)
        self._marks[1:] = self._loaded
        self._origin[:] = (self.sequence + 1, *source, gradient is None)
        failpoint("worker.before_numbering")
        self._marks[0] += 1  # last: a death before this leaves the former one, which all have taken
        self._unsent = list(range(len(self._pushes)))
        self.flush()

    def flush(self) -> bool:
        """Send what is left and has room; return whether nothing is left."""
        for server in [server for server in self._unsent if self._pushes[server].ready()]:
            gradient = self._outgoing[self._cuts[server]]
            payload = [] if self._origin[-1] else self._compressors[server].encode(gradient)
            self.bytes_sent += payload_bytes(payload)
            version = int(self._marks[1 + server])
            self._pushes[server].send(GradientPush(self._worker, self.sequence, version, payload))
            self._unsent.remove(server)
        return not self._unsent

    def close(self) -> None:
        """Say that no further gradient will come."""
        for sender in self._pushes:
            sender.close()

    def begin_after(self, sequence: int) -> None:
        """Have nothing on its way, and so many gradients behind it."""
        self._marks[0], self._unsent = sequence, []

    def state_dict(self) -> State:
        """Return what is on its way, and the newest slices."""
        return {
            "marks": self._marks.copy(),
            "origin": self._origin.copy(),
            "outgoing": self._outgoing.clone(),
            "unsent": list(self._unsent),
            "slices": [None if piece is None else dataclasses.asdict(piece) for piece in self._slices],
            "loaded": list(self._loaded),
            "form": self._form,
            "compressors": [compressor.state_dict() for compressor in self._compressors],
            "bytes_sent": self.bytes_sent,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`; a gradient on its way has the form that it was saved in."""
        if (form := state.get("form", self._form)) != self._form:  # version 0.1 has none
            raise CheckpointError(
                f"the gradients on their way were saved as '{form}', not '{self._form}': resume with"
                f" parallel.compression.kind '{form}'"
            )
        self._marks[:], self._origin[:] = state["marks"], state.get("origin", 0)  # version 0.1 has none
        self._outgoing.copy_(state["outgoing"])
        self._unsent, self._loaded = list(state["unsent"]), list(state["loaded"])
        self._slices = [None if piece is None else ParameterSlice(**piece) for piece in state["slices"]]
        for compressor, saved in zip(self._compressors, state["compressors"], strict=True):
            compressor.load_state_dict(saved)
        self.bytes_sent = state["bytes_sent"]


def _compressor(setup: ServingSetup, server: int, part: slice, parameters: Iterable[Tensor]) -> Compressor:
    """Return what writes this worker's gradients of one server's part of the parameters."""
    purpose = f"compression/{server}"
    generator = seeding.torch_stream(setup.learner.seed, "worker", setup.index, purpose)
    layers = layers_within(parameters, part)
    return make_compressor(setup.compression, part.stop - part.start, layers, generator)
