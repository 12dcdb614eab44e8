"""A corridor with a small reward near and a large one far away: it takes deep exploration and bootstrapping."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from qfleet.envs.small.model import Model

LEFT, RIGHT = 0, 1


class Chain(gymnasium.Env[Any, Any]):
    """States 0 to length - 1, start 0. Left at state 0 pays `small`; entering the last state pays `large` and ends."""

    metadata = {"render_modes": ["ansi"], "render_fps": 8}  # noqa: RUF012  (Gymnasium's own declaration)

    def __init__(
        self, length: int = 8, small: float = 0.01, large: float = 1.0, render_mode: str | None = None
    ) -> None:
        self.observation_space = spaces.Discrete(length)
        self.action_space = spaces.Discrete(2)
        self.render_mode = render_mode
        self._length, self._small, self._large = length, small, large
        self._model = self.model()
        self._state = 0

    def model(self) -> Model:
        """Return the exact rules."""
        states = np.arange(self._length)
        to = np.stack([np.maximum(states - 1, 0), np.minimum(states + 1, self._length - 1)], axis=1)
        terminal = to == self._length - 1
        reward = np.where(terminal, self._large, 0.0)
        reward[0, LEFT] = self._small
        return Model(to, reward, terminal)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Begin at state 0."""
        super().reset(seed=seed)
        self._state = 0
        return self._state, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Go left (0) or right (1)."""
        here = (self._state, action)
        self._state = int(self._model.next_state[here])
        return self._state, float(self._model.reward[here]), bool(self._model.terminal[here]), False, {}

    def render(self) -> str:
        """Return the corridor as text."""
        return "".join("@" if state == self._state else "." for state in range(self._length))
