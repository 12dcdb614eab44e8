"""MinAtar as the table's peer plays it (gymnax, which purejaxql learns in), to compare like with like.

Two things differ from the published rules: no action is sticky, and in Asterix a thing for which there is no lane
empties one instead of being left out. One lane, drawn anew each time, is never looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfleet.envs.tensor.minatar import asterix
from qfleet.envs.tensor.protocol import GameState, below

CHANGES: dict[str, Any] = {"env.sticky": 0.0}
"""Settings that the peer's rules mean for an experiment."""


def spawned(state: GameState, spawns: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Return the things and their columns, each [E, 8], after one appeared, or emptied a lane, where `spawns` [E]."""
    lanes = torch.arange(8, device=random.device)
    seen = lanes != below(random[:, 4:5], 8)
    free = (state["things"] == 0) & seen
    full = ~free.any(1, keepdim=True)
    choices = torch.where(full, seen, free) & spawns.unsqueeze(1)
    rank = choices.cumsum(1)
    lane = choices & (rank == below(random[:, 3:4], rank[:, -1:]) + 1)
    leftwards = random[:, 1:2] >= 0.5
    kind = ((random[:, 2:3] < 1 / 3).to(torch.int8) + 1) * ~full
    things = torch.where(lane, torch.where(leftwards, -kind, kind), state["things"])
    return things, torch.where(lane, leftwards.to(torch.int8) * 9, state["things_x"])


def adopt() -> None:
    """Let Asterix be played so from now on, in this process."""
    asterix._spawned = spawned
    asterix.Asterix.draws = 5
