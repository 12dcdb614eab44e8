"""A role that compares split updates with unsplit ones on one mesh after another, and sends how far they are apart."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import split_cases
import torch

from qfleet.core.protocols import Sender
from qfleet.core.role import DONE, Role, State, Status
from qfleet.parallel.mesh import Degrees, Mesh
from qfleet.parallel.split_update import Staging

WAIT_S = 60.0
"""How long ranks wait for each other at most."""


@dataclass(frozen=True)
class Job:
    """One comparison: what is called with case, mesh, staging and whether data ranks have shares."""

    degrees: Degrees
    what: str
    case: str
    staging: Staging | None = None
    sharded: bool = False

    def __str__(self) -> str:
        how = f", {self.staging.schedule} {self.staging.micro_batches}" if self.staging else ""
        how += ", sharded" if self.sharded else ""
        return f"{self.what} {self.case} on {self.degrees}{how}"


@dataclass(frozen=True)
class Settings:
    rank: int
    size: int
    folder: str
    jobs: tuple[Job, ...]


@dataclass
class Handles:
    results: Sender[Any]


class Comparing(Role):
    kind = "comparing"

    def __init__(self, settings: Settings, handles: Handles) -> None:
        self.settings, self.handles = settings, handles

    def step(self) -> Status:
        torch.set_num_threads(1)
        s = self.settings
        os.environ[split_cases.FOLDER] = s.folder
        found: dict[str, dict[str, float]] = {}
        mesh: Mesh | None = None
        for number, job in enumerate(s.jobs):
            if mesh is None or mesh.degrees != job.degrees:
                if mesh is not None:
                    mesh.close()
                mesh = Mesh(job.degrees, s.rank, s.size, f"file://{s.folder}/meet-{s.size}-{number}", "cpu", WAIT_S)
            found[str(job)] = getattr(split_cases, f"run_{job.what}")(job.case, mesh, job.staging, job.sharded)
        if mesh is not None:
            mesh.close()
        self.handles.results.send(found)
        self.handles.results.close()
        return DONE

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass
