"""A role that takes part in a gradient group, in a module that child processes can import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qfleet.core.protocols import Sender
from qfleet.core.role import DONE, Role, State, Status
from qfleet.core.types import Notice
from qfleet.parallel.gradsync import GradientGroup


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(10_001, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@dataclass(frozen=True)
class Settings:
    rank: int
    size: int
    rendezvous: str
    deserter: int = -1


@dataclass
class Handles:
    results: Sender[Any]


class Summing(Role):
    """Sums once, and sends what came of it."""

    kind = "summing"

    def __init__(self, settings: Settings, handles: Handles) -> None:
        self.settings, self.handles = settings, handles

    def step(self) -> Status:
        s = self.settings
        group = GradientGroup(s.rank, s.size, s.rendezvous, 30.0)
        assert not torch.distributed.is_initialized(), "the user's default group is not touched"
        if s.deserter >= 0:
            return self._desert(group)
        summed = group.all_reduce_(gradient(s.rank))
        self.handles.results.send(summed)
        group.close()
        self.handles.results.close()
        return DONE

    def _desert(self, group: GradientGroup) -> Status:
        if self.settings.rank == self.settings.deserter:
            group.close()
        else:
            try:
                group.all_reduce_(torch.ones(1))
            except ConnectionError as error:
                self.handles.results.send(Notice(self.kind, self.settings.rank, "lost", str(error)))
        self.handles.results.close()
        return DONE

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass
