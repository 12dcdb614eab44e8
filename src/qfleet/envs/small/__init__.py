"""Five small environments whose best behaviour is known, registered with Gymnasium as qfleet/NAME-v0."""

import gymnasium

_STEPS = {"Identity": None, "Chain": 100, "Catch": None, "Maze": 200, "Recall": None}
"""Steps after which an episode is truncated; None where the rules end it."""


def register_small() -> None:
    """Register the environments; a second call changes nothing."""
    for name, steps in _STEPS.items():
        if f"qfleet/{name}-v0" not in gymnasium.registry:
            entry = f"qfleet.envs.small.{name.lower()}:{name}"
            gymnasium.register(f"qfleet/{name}-v0", entry_point=entry, max_episode_steps=steps)
