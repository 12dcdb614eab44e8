"""CartPole in tensors: balance a pole on a cart, with the physics of Gymnasium's CartPole-v1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.envs.tensor.constants import Constants
from qfleet.envs.tensor.picture import Picture, blank, draw_line
from qfleet.envs.tensor.protocol import Game, GameState

GRAVITY, FORCE, TICK = 9.8, 10.0, 0.02  # m/s², N, s
POLE_MASS, TOTAL_MASS, HALF_LENGTH = 0.1, 1.1, 0.5  # kg, kg, m
FARTHEST, STEEPEST = 2.4, math.radians(12)  # m, rad
_COUPLING = POLE_MASS * HALF_LENGTH / TOTAL_MASS  # m
_HEIGHT, _WIDTH, _SCALE = 160, 240, 45  # pixels, pixels, pixels per m
_CART, _POLE, _TRACK = (52, 73, 94), (202, 111, 30), (150, 150, 150)


class CartPole(Game):
    """Observes position, velocity, angle and angular velocity; actions push left (0) or right (1). A step pays 1.

    The state is `physics` [E, 4], in the observation's order. The four columns of `random` decide the start.
    """

    draws = 4

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Compute the physics in `dtype`; observations are float32 all the same."""
        self._dtype = dtype
        self._constants = Constants(
            torch.tensor([-FORCE / TOTAL_MASS, FORCE / TOTAL_MASS], dtype=dtype),  # by action
            torch.tensor(HALF_LENGTH * 4 / 3 / GRAVITY, dtype=dtype),  # divided by gravity, as all of `twist`
            torch.tensor([FARTHEST, math.inf, STEEPEST, math.inf], dtype=dtype),
        )
        leaf = LeafSpec(shape=(4,), dtype="float32")
        self.spec = EnvSpec(name="qfleet/CartPole", observations={PLAIN: leaf}, actions=2)

    def start(self, random: Tensor) -> GameState:
        """Return carts for `random` [E, 4], each number of their physics between -0.05 and 0.05."""
        return {"physics": random.to(self._dtype) * 0.1 - 0.05}

    def move(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Push the carts by actions [E]; it ends where a cart leaves the track or a pole leans too far."""
        physics = state["physics"]
        forces, inertia, limits = self._constants.on(physics.device)
        _, velocity, angle, spin = physics.unbind(1)
        cos, sin = angle.cos(), angle.sin()
        push = torch.addcmul(forces.index_select(0, action), spin * spin, sin, value=_COUPLING)
        inertia = torch.addcmul(inertia, cos, cos, value=-_COUPLING / GRAVITY)
        twist = torch.addcmul(sin, cos, push, value=-1 / GRAVITY) / inertia
        thrust = torch.addcmul(push, twist, cos, value=-_COUPLING)
        moved = physics.add(torch.stack((velocity, thrust, spin, twist), 1), alpha=TICK)
        over = (moved.abs() > limits).any(1)
        return {"physics": moved}, torch.ones_like(push, dtype=torch.float32), over

    def observe(self, state: GameState) -> dict[str, Tensor]:
        """Return position (m), velocity (m/s), angle (rad) and angular velocity (rad/s) [E, 4]."""
        return {PLAIN: state["physics"].to(torch.float32, copy=True)}

    def draw(self, state: GameState, index: int) -> Picture:
        """Return game `index` as an RGB picture [160, 240, 3]."""
        position, _, angle, _ = state["physics"][index].tolist()
        picture, track = blank(_HEIGHT, _WIDTH), 0.75 * _HEIGHT
        hinge = (_WIDTH / 2 + position * _SCALE, track - 10)
        length = 2 * HALF_LENGTH * _SCALE * 2  # twice as long as it is: it is what one looks at
        tip = (hinge[0] + length * math.sin(angle), hinge[1] - length * math.cos(angle))
        draw_line(picture, (0, track), (_WIDTH, track), 2, _TRACK)
        draw_line(picture, (hinge[0] - 12, track - 5), (hinge[0] + 12, track - 5), 14, _CART)
        draw_line(picture, hinge, tip, 6, _POLE)
        return picture
