"""Remember what was shown: a task that no agent without memory can do better than by guessing."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_PIXELS = 32


class Recall(gymnasium.Env[Any, Any]):
    """The first step shows a cue, `length` blank steps follow, then a question: naming the cue pays 1, anything else 0.

    Observes 0 to cues - 1 for a cue, `cues` for a blank and `cues` + 1 for the question. Only the answer counts.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}  # noqa: RUF012  (Gymnasium's own declaration)

    def __init__(self, length: int = 10, cues: int = 2, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Discrete(cues + 2)
        self.action_space = spaces.Discrete(cues)
        self.render_mode = render_mode
        self._length, self._cues = length, cues
        self._cue = self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Show a random cue."""
        super().reset(seed=seed)
        self._cue, self._steps = int(self.np_random.integers(self._cues)), 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Go on, or answer the question."""
        asked = self._steps > self._length
        self._steps += 1
        return self._observe(), float(asked and action == self._cue), asked, False, {}

    def render(self) -> Any:
        """Return what is seen as text or as an RGB image with a cell for each observation, by the render mode."""
        seen = self._observe()
        if self.render_mode == "ansi":
            return {self._cues: ".", self._cues + 1: "?"}.get(seen, str(seen))
        if self.render_mode is None:
            return None
        cells = np.where(np.arange(self._cues + 2) == seen, 255, 40).astype(np.uint8)
        return np.kron(cells[None, :, None], np.ones((_PIXELS, _PIXELS, 3), np.uint8))

    def _observe(self) -> int:
        if self._steps == 0:
            return self._cue
        return self._cues if self._steps <= self._length else self._cues + 1
