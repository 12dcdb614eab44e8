"""What stands for an environment of this process that raised an exception again and again, and was given up."""

from __future__ import annotations

from typing import Any

import gymnasium

Environment = gymnasium.Env[Any, Any]
LOSSES = 5
"""How often in a row, without the end of an episode in between, an environment may be lost; then it is given up."""


class Still(gymnasium.Env[Any, Any]):
    """Stands for an environment that was given up: it shows how its next episode would begin, until it is reset."""

    def __init__(self, env: Environment, first: tuple[Any, dict[str, Any]]) -> None:
        self.env, self._first = env, first
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of the environment that it stands for."""
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Do nothing."""
        observation, info = self._first
        return observation, 0.0, False, False, info

    def close(self) -> None:
        """Close the environment that it stands for."""
        self.env.close()
