"""Parameter servers with one slow worker: gradients applied a second, each on arrival beside all of a round at once."""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from qfleet.bench.pace import measure_pace
from qfleet.bench.table import Row
from qfleet.core.spec import PLAIN, EnvSpec
from qfleet.core.usercode import UserCode
from qfleet.envs import GymConfig
from qfleet.experiment import Experiment

WORKERS, TIMES_SLOWER = 4, 5
GRADIENT_S = 0.1
"""What a gradient takes a worker, besides a little computing: it sleeps, so that cores do not bind."""
GOAL = 3.5


class Sleepy(nn.Module):
    """A small torso whose gradients take their time; those of the first process to compute one take several times that.

    Which process was the first is known by a file, since a torso is not told whose it is.
    """

    def __init__(self, claim: Path, spec: EnvSpec) -> None:
        super().__init__()
        (size,) = spec.observations[PLAIN].shape
        self._layer = nn.Linear(size, 32)
        self._claim = claim
        self._pause_s = 0.0

    def forward(self, observation: Tensor) -> Tensor:
        """Map vectors [B, S] to features [B, 32]."""
        if torch.is_grad_enabled():
            self._pause_s = self._pause_s or GRADIENT_S * (TIMES_SLOWER if _is_first(self._claim) else 1)
            time.sleep(self._pause_s)
        return torch.relu(self._layer(observation))


def _is_first(claim: Path) -> bool:
    """Return whether this call is the one that makes the file."""
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def measure(seconds: float = 12.0) -> list[Row]:
    """Run both modes, as whole runs in processes."""
    ours, together = gradients_per_s("async", seconds), gradients_per_s("sync", seconds)
    return [
        Row(
            what=f"parameter server, one of {WORKERS} workers {TIMES_SLOWER} times slower, mode async",
            ours=f"{ours:,.1f} gradients/s",
            peer=f"{together:,.1f} gradients/s (mode sync)",
            ratio=ours / together,
            goal=f"ratio {GOAL}",
            met=ours / together >= GOAL,
        )
    ]


def gradients_per_s(mode: str, seconds: float) -> float:
    """Return the gradients a second that the server applies in a run of this mode."""
    with tempfile.TemporaryDirectory(prefix="qfleet-claim-") as directory:
        code = UserCode(network=partial(Sleepy, Path(directory) / "first"))
        pace = measure_pace(experiment(mode), code, seconds)
    of_each_update = WORKERS if mode == "sync" else 1
    return of_each_update * pace.updates / seconds


def experiment(mode: str) -> Experiment:
    """Return a run of CartPole with so many workers, where everything but gradients is quick."""
    return Experiment.model_validate({
        "placement": "processes",
        "topology": "pipeline",
        "device": "cpu",
        "env": GymConfig(id="CartPole-v1"),
        "network": {"kind": "custom", "dense": 32},
        "actor": {"envs": 8, "unroll": 4},
        "learner": {"batch_size": 32, "train_period": 0.25, "learning_starts": 200},
        "learners": WORKERS,
        "parallel": {"update": {"kind": "server", "mode": mode}},
    })  # fmt: skip
