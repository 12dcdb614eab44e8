"""Acrobot in tensors: swing two hanging links up to the line, with the physics of Gymnasium's Acrobot-v1."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.envs.tensor.constants import Constants
from qfleet.envs.tensor.picture import Picture, blank, draw_line
from qfleet.envs.tensor.protocol import Game, GameState

GRAVITY, TICK = 9.8, 0.2  # m/s², s
FASTEST_UPPER, FASTEST_LOWER = 4 * math.pi, 9 * math.pi  # rad/s
LINE = 1.0  # m above the upper joint
_SIDE, _SCALE = 200, 42  # pixels, pixels per m
_LINKS, _JOINTS, _LINE = (52, 73, 94), (202, 111, 30), (150, 150, 150)


class Acrobot(Game):
    """Observes cosine and sine of both angles, then both angular velocities; a step pays -1, the last one 0.

    Actions are a torque of -1, 0 or 1 N m at the lower joint. The state is `physics` [E, 4]: the upper link's angle
    from hanging, the lower link's angle from the upper one, and their velocities. Both links are 1 m long and weigh
    1 kg, with their centre in the middle and a moment of inertia of 1 kg m². The four columns of `random` decide the
    start.
    """

    draws = 4

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Compute the physics in `dtype`; observations are float32 all the same."""
        self._dtype = dtype
        turn = 1 / (2 * math.pi)
        self._constants = Constants(
            torch.tensor([-1.0, 0.0, 1.0], dtype=dtype),  # torque by action
            torch.tensor([turn, turn, 0.0, 0.0], dtype=dtype),  # turns per radian: velocities never wrap
            torch.tensor([math.inf, math.inf, FASTEST_UPPER, FASTEST_LOWER], dtype=dtype),
            *(torch.tensor(number, dtype=dtype) for number in (-3.5, 1.25, GRAVITY / 2)),
        )
        leaf = LeafSpec(shape=(6,), dtype="float32")
        self.spec = EnvSpec(name="qfleet/Acrobot", observations={PLAIN: leaf}, actions=3)

    def start(self, random: Tensor) -> GameState:
        """Return links for `random` [E, 4], each number of their physics between -0.1 and 0.1."""
        return {"physics": random.to(self._dtype) * 0.2 - 0.1}

    def move(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Apply the torques of actions [E] for one tick; it ends where the tip is above the line."""
        physics = state["physics"]
        torques, turns, limits, *numbers = self._constants.on(physics.device)
        torque = torques.index_select(0, action)
        # The classic fourth-order Runge-Kutta step.
        first = _change(physics, torque, *numbers)
        second = _change(physics.add(first, alpha=TICK / 2), torque, *numbers)
        third = _change(physics.add(second, alpha=TICK / 2), torque, *numbers)
        fourth = _change(physics.add(third, alpha=TICK), torque, *numbers)
        slope = (first + fourth).add_(second + third, alpha=2)
        moved = physics.add(slope, alpha=TICK / 6)
        moved = moved.sub((moved * turns).round(), alpha=2 * math.pi)  # angles between -pi and pi
        moved = moved.clamp(-limits, limits)
        upper, lower, _, _ = moved.unbind(1)
        over = upper.cos() + (upper + lower).cos() < -LINE
        return {"physics": moved}, over.float() - 1, over

    def observe(self, state: GameState) -> dict[str, Tensor]:
        """Return cosine and sine of both angles and both velocities (rad/s) [E, 6]."""
        physics = state["physics"]
        circle = torch.stack((physics.cos(), physics.sin()), 2)[:, :2]  # of all: half of a row is slower than all of it
        return {PLAIN: torch.cat((circle.flatten(1), physics[:, 2:]), 1).float()}

    def draw(self, state: GameState, index: int) -> Picture:
        """Return game `index` as an RGB picture [200, 200, 3]."""
        upper, lower = state["physics"][index, :2].tolist()
        picture, height = blank(_SIDE, _SIDE), _SIDE / 2 - LINE * _SCALE
        points = [(_SIDE / 2, _SIDE / 2)]
        for angle in (upper, upper + lower):
            column, row = points[-1]
            points.append((column + _SCALE * math.sin(angle), row + _SCALE * math.cos(angle)))
        draw_line(picture, (0, height), (_SIDE, height), 2, _LINE)
        for joint, end in itertools.pairwise(points):
            draw_line(picture, joint, end, 8, _LINKS)
            draw_line(picture, joint, joint, 12, _JOINTS)
        return picture


def _change(physics: Tensor, torque: Tensor, minus_d1: Tensor, d2: Tensor, half_gravity: Tensor) -> Tensor:
    """Return how fast physics [E, 4] changes under torques [E], by Sutton and Barto's equations of motion.

    With the masses and lengths put in, their d1 is 3.5 + cos(lower) and their d2 is 1.25 + cos(lower) / 2; what is
    given of them is the constant part.
    """
    upper, lower, upper_speed, lower_speed = physics.unbind(1)
    cos, sin = lower.cos(), lower.sin()
    inertia, minus_d1, d2 = d2, minus_d1 - cos, torch.add(d2, cos, alpha=0.5)
    minus_ratio = d2 / minus_d1
    lower_weight = (upper + lower).sin() * half_gravity
    weight = torch.add(lower_weight, upper.sin(), alpha=1.5 * GRAVITY)
    load = torch.addcmul(weight, lower_speed * sin, torch.add(upper_speed, lower_speed, alpha=0.5), value=-1)
    drive = torch.addcmul(torque - lower_weight, minus_ratio, load, value=-1)
    drive = torch.addcmul(drive, upper_speed * upper_speed, sin, value=-0.5)
    lower_change = drive / torch.addcmul(inertia, d2, minus_ratio)
    upper_change = torch.addcmul(load, d2, lower_change) / minus_d1
    return torch.stack((upper_speed, lower_speed, upper_change, lower_change), 1)
