"""The tensor-native games by name: their settings, their limits, and where their rules are.

No game and no tensor is loaded before one is made: the command line reads these settings every time.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import gymnasium
from pydantic import Field, ValidationError, model_validator

from qfleet.core.config import Config, describe
from qfleet.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from qfleet.envs.tensor.protocol import Game, TensorEnv


class _Entry(NamedTuple):
    module: str
    rules: str
    """The class in that module."""
    time_limit: int | None
    """Steps after which an episode is truncated; None where the rules end every episode."""
    id: str
    """Gymnasium's name for it, without version."""


_GAMES = {
    "cartpole": _Entry("cartpole", "CartPole", 500, "qfleet/CartPole"),
    "acrobot": _Entry("acrobot", "Acrobot", 500, "qfleet/Acrobot"),
    # Not the names of the small ones: Gymnasium would take those for outdated versions of these.
    "maze": _Entry("maze", "Maze", 200, "qfleet/TensorMaze"),
    "catch": _Entry("catch", "Catch", None, "qfleet/TensorCatch"),
    "minatar-breakout": _Entry("minatar.breakout", "Breakout", 1000, "qfleet/MinAtar-Breakout"),
    "minatar-asterix": _Entry("minatar.asterix", "Asterix", 1000, "qfleet/MinAtar-Asterix"),
    "minatar-freeway": _Entry("minatar.freeway", "Freeway", None, "qfleet/MinAtar-Freeway"),
    "minatar-seaquest": _Entry("minatar.seaquest", "Seaquest", 1000, "qfleet/MinAtar-Seaquest"),
    "minatar-space_invaders": _Entry("minatar.space_invaders", "SpaceInvaders", 1000, "qfleet/MinAtar-SpaceInvaders"),
}


_OPTIONS = ("sticky", "ramping", "all_actions")
"""What the class of a MinAtar game takes."""


class TensorConfig(Config):
    """A game whose rules are tensor operations, so that it can live on the device that learns."""

    kind: Literal["tensor"] = "tensor"
    game: Literal[
        "cartpole",
        "acrobot",
        "maze",
        "catch",
        "minatar-breakout",
        "minatar-asterix",
        "minatar-freeway",
        "minatar-seaquest",
        "minatar-space_invaders",
    ]
    """Which game."""
    sticky: float = Field(0.1, ge=0, lt=1)
    """Probability that the last action is repeated; MinAtar only."""
    ramping: bool = True
    """Whether a game that has levels becomes harder with time; MinAtar only."""
    all_actions: bool = False
    """Whether all six actions can be chosen, not only those that the game knows; MinAtar only."""
    reward_scale: float = Field(1.0, gt=0)
    """Rewards for learning are multiplied by this, after clipping; scores are not."""
    reward_clip: float | None = Field(None, gt=0)
    """Rewards for learning are limited to plus or minus this; None for no limit."""
    time_limit: int | None = Field(None, ge=1)
    """Steps after which an episode is truncated in learning; None for the game's own limit, which evaluation keeps."""

    @property
    def options(self) -> dict[str, Any]:
        """What the game's class takes besides the name: nothing outside of MinAtar."""
        names = _OPTIONS if self.game.startswith("minatar-") else ()
        return {name: getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _refuse_options_without_effect(self) -> TensorConfig:
        for name in _OPTIONS:
            if name not in self.options and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"'{name}' is a setting of the MinAtar games; '{self.game}' has no such thing")
        return self


def default_time_limit(game: str) -> int | None:
    """Return after how many steps an episode of the game is truncated where nothing else is said."""
    return _GAMES[game].time_limit


def checked_options(game: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a game's class; raises ConfigError for one that it does not have or cannot take."""
    known = list(inspect.signature(_rules(game)).parameters)
    for name in options.keys() - set(known):
        hint = did_you_mean(name, known) or f" It has: {', '.join(known)}"
        raise ConfigError(f"'{game}' has no option '{name}'.{hint}")
    try:
        TensorConfig.model_validate({"game": game, **{name: options[name] for name in _OPTIONS if name in options}})
    except ValidationError as error:
        raise ConfigError(f"'{game}': {describe(error, TensorConfig)}") from None
    return options


def make_game(game: str, **options: Any) -> Game:
    """Return the rules of a game; `options` are those of its class."""
    rules: Game = _rules(game)(**options)
    return rules


def _rules(game: str) -> Any:
    """Return a game's class."""
    return getattr(importlib.import_module(f"qfleet.envs.tensor.{_GAMES[game].module}"), _GAMES[game].rules)


def make_tensor_env(config: TensorConfig, evaluation: bool = False) -> TensorEnv:
    """Return what plays the game on any device; with `evaluation`, only the game's own limit ends an episode early."""
    from qfleet.envs.tensor.protocol import TensorEnv

    limit = None if evaluation else config.time_limit
    return TensorEnv(make_game(config.game, **config.options), limit or default_time_limit(config.game))


def register_games() -> None:
    """Register every game with Gymnasium, as version 1; a second call changes nothing."""
    for game, entry in _GAMES.items():
        if f"{entry.id}-v1" not in gymnasium.registry:
            gymnasium.register(
                f"{entry.id}-v1",
                entry_point="qfleet.envs.tensor.gymnasium_env:TensorGame",
                kwargs={"game": game},
                max_episode_steps=entry.time_limit,
            )
