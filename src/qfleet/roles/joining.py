"""How the ranks of a learner group learn as one: what they sum, and how they see that they are still the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from qfleet.algo.flat import checksum
from qfleet.algo.steps import StepFactory
from qfleet.algo.updates import Update
from qfleet.core import codec, seeding
from qfleet.core.errors import QfleetError
from qfleet.core.role import State
from qfleet.parallel.buckets import BucketedSum
from qfleet.parallel.compression.build import make_compressor
from qfleet.parallel.compression.exchange import CompressedSum, reduced_bytes
from qfleet.parallel.compression.feedback import Compressor
from qfleet.parallel.compression.powersgd import matrices
from qfleet.parallel.devices import own_device
from qfleet.parallel.gradsync import GradientGroup
from qfleet.parallel.group import Group
from qfleet.parallel.local import LocalConfig, LocalStep
from qfleet.parallel.plan import ParallelConfig
from qfleet.parallel.turns import TurnGroup
from qfleet.roles.feed import Company
from qfleet.roles.learner_setup import GroupConfig, LearnerSetup

if TYPE_CHECKING:  # they load much of torch that few runs need
    from qfleet.parallel.mesh import Mesh
    from qfleet.parallel.split_update import SplitUpdate
    from qfleet.roles.fused.setup import FusedSetup

S = TypeVar("S", "LearnerSetup", "FusedSetup")
MEETING_S = 300.0
"""How long ranks wait for each other, at the beginning and in each sum."""


def placed(setup: S) -> S:
    """Return a rank's setup with the device that it has for itself; ranks that take turns in one process share one."""
    group = setup.group
    if group is None or group.turns is not None:
        return setup
    return replace(setup, device=own_device(setup.device, group.rank))


def meet_group(place: GroupConfig, life: int, device: str) -> Group:
    """Meet the other ranks; in each life of the group at another place."""
    if place.turns is not None:
        return TurnGroup(place.rank, place.turns)
    return GradientGroup(place.rank, place.size, f"{place.rendezvous}-{life}", MEETING_S, device)


class Joining:
    """What one rank does with its group. Every rank makes the same calls in the same order."""

    def __init__(self, config: ParallelConfig, group: Group, seed: int, mesh: Mesh | None = None) -> None:
        """Take the group of all ranks, and where networks are split, the mesh that they are split over."""
        self._config, self._group, self._seed = config, group, seed
        self.mesh = mesh
        self._buckets = BucketedSum(group)
        self._compressor: Compressor | None = None
        self._compressed: CompressedSum | None = None
        self._sums = self._bytes = 0

    @property
    def apart(self) -> bool:
        """Whether ranks make steps of their own, so that one may skip an update that another makes."""
        return isinstance(self._config.update, LocalConfig)

    @property
    def description(self) -> str:
        """How many ranks there are, and how they sum."""
        return f"{self._group.size} ranks that sum by {self._group.transport}"

    @property
    def stepper(self) -> StepFactory | None:
        """What makes steps, where it is not what the accelerator chose."""
        if not isinstance(self._config.update, LocalConfig):
            return None
        return partial(LocalStep, config=self._config.update, ranks=self._group.size)

    def attach(self, update: Update) -> None:
        """Get to know the network whose gradients, or ways, will be summed."""
        if self.mesh is not None:
            return
        if self._config.compression.kind != "none":
            flat, layers = update.flat.parameters, matrices(update.online.parameters())
            own = seeding.torch_stream(self._seed, "learner", self._group.rank, "compression", device=flat.device)
            self._compressor = make_compressor(self._config.compression, flat.numel(), layers, own)
            self._compressed = CompressedSum(self._compressor, self._group)
            self._untrained = update.flat.untrained
        elif not self.apart:
            self._buckets.attach(update.online, update.flat.gradients)

    def sum_(self, vector: Tensor) -> None:
        """Replace a flat vector [P] by its sum over all ranks."""
        self._sums += 1
        if self._compressed is not None:
            self._compressed(vector)
            vector.index_fill_(0, self._untrained, 0.0)  # a sign is never zero
            return
        self._bytes += reduced_bytes(vector, self._group.size)
        self._buckets(vector)

    def blamed(self) -> list[int]:
        """Return the ranks whose loss or gradient is known to have spoiled the last update; all that skip it ask."""
        if self.apart:
            return [self._group.rank]  # who learns apart skips apart
        if self._compressed is not None:
            return [] if self._compressed.culprit is None else [self._compressed.culprit]
        flags = self._group.all_gather(torch.tensor([int(self._buckets.spoiled)]))
        return [rank for rank, flag in enumerate(flags) if flag.item()]

    def meet(self, update: Update, updates: int, drawn: tuple[int, int] = (0, 0)) -> None:
        """Put split weights together; raise an error if a rank has other ones than the rest, or another draw.

        Only ranks that learn apart may have other weights. `drawn` is the shard and the number of the draw that was
        learned from last: sums of parts of different draws would be the same on all ranks, and wrong.
        """
        self._require_same_draw(drawn, updates)
        if self.mesh is not None:
            cast("SplitUpdate", update).assemble()
        if not self.apart:
            self._group.require_same(checksum(update.flat.to_numpy()), f"the weights after update {updates}")

    def _require_same_draw(self, drawn: tuple[int, int], updates: int) -> None:
        first, *others = (one.tolist() for one in self._group.all_gather(torch.tensor(drawn)))
        told = [f"rank {rank} from {draw} of shard {shard}" for rank, (shard, draw) in enumerate(others, 1)]
        odd = [text for text, other in zip(told, others, strict=True) if other != first]
        if odd:
            raise QfleetError(
                f"ranks learn from different draws: rank 0 from {first[1]} of shard {first[0]}, {', '.join(odd)}, at"
                f" update {updates}. This is a defect of qfleet, and updates since the last checkpoint may be wrong:"
                " resume from it, and please report what happened before"
            )

    def skipped_apart(self, skipped: int) -> dict[int, int]:
        """Return, by the ranks that learn apart from this one, how many updates they skipped, if any; all come here."""
        counts = [int(one) for one in self._group.all_gather(torch.tensor([skipped]))]
        return {rank: count for rank, count in enumerate(counts) if count and rank != self._group.rank}

    def agreed(self, wanted: bool) -> bool:
        """Return whether rank 0 wants it."""
        return bool(self._group.all_gather(torch.tensor([int(wanted)]))[0].item())

    def shared(self, state: State | None) -> State | None:
        """Return what rank 0 gave, on every rank."""
        header, arrays = codec.pack(state)
        forms = [(array.dtype.str, list(array.shape)) for array in arrays]
        header, forms = codec.unpack(self._group.share(codec.pack([header, forms])[0]), [])
        parts = [arrays[number].tobytes() if self._group.rank == 0 else b"" for number in range(len(forms))]
        shared = [
            np.frombuffer(self._group.share(part), dtype).reshape(shape)
            for part, (dtype, shape) in zip(parts, forms, strict=True)
        ]
        restored: State | None = codec.unpack(header, shared)
        return restored

    @property
    def company(self) -> Company:
        """The ranks as those that get parts of the same draws."""
        return Company(self._group.size // self._config.split, self._newest)

    def _newest(self, draw: int) -> int:
        """Return the largest number of a draw that any rank has next."""
        return max(int(other) for other in self._group.all_gather(torch.tensor([draw])))

    def metrics(self) -> Mapping[str, float]:
        """Return the bytes that this rank sends for each sum, on average."""
        if self.mesh is not None:
            return {}
        sent = self._bytes if self._compressed is None else self._compressed.bytes_sent
        return {"gradient_bytes": sent / max(self._sums, 1)}

    def state_dict(self) -> State:
        """Return what compression still owes, and which rank does."""
        if self._compressor is None:
            return {}
        form = self._config.compression.model_dump(mode="json")
        return {"compressor": self._compressor.state_dict(), "form": form, "rank": self._group.rank}

    def load_state_dict(self, state: State) -> None:
        """Continue; nothing is owed by a run that was not compressed so before, or by a rank that has another's state.

        That is paid by the other: after a death all have the first rank's, and so has who had left when it was saved.
        """
        form = self._config.compression.model_dump(mode="json")
        own = state.get("rank", self._group.rank) == self._group.rank and state.get("form", form) == form
        if self._compressor is not None and "compressor" in state and own:
            self._compressor.load_state_dict(state["compressor"])

    def adapted(self, state: State) -> State:
        """Return a rank's saved state of its update as this group can go on from it.

        Ranks that have learned apart and shall be one again all take the first one's.
        """
        learned_apart = "meeting" in state.get("step", {})
        restored = self.shared(state) if learned_apart and not self.apart else state
        assert restored is not None
        return restored

    def close(self) -> None:
        """Leave the group."""
        self._group.close()
        if self.mesh is not None:
            self.mesh.close()
