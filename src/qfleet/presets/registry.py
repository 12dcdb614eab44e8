"""Finds a preset by name, by registered prefix (`gym:ID`), or as an importable `module:function`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from qfleet.core.errors import ConfigError, QfleetError, did_you_mean
from qfleet.experiment import Experiment
from qfleet.presets.atari import atari, atari_fast
from qfleet.presets.classic import acrobot, cartpole, lunarlander, mountaincar
from qfleet.presets.minatar import minatar
from qfleet.presets.registered import registered
from qfleet.presets.small import catch, maze, recall

PRESETS: dict[str, Callable[[], Experiment]] = {
    "cartpole": cartpole,
    "acrobot": acrobot,
    "mountaincar": mountaincar,
    "lunarlander": lunarlander,
    "catch": catch,
    "maze": maze,
    "recall": recall,
}
PREFIXES: dict[str, tuple[str, Callable[[str], Experiment]]] = {
    "minatar": ("GAME", minatar),
    "atari": ("GAME", atari),
    "atari-fast": ("GAME", atari_fast),
    "gym": ("ID", registered),
}
"""By prefix: what follows the colon, and the function that takes it."""
FACTORY = "gym:"
"""The preset of an environment that has no id because a function makes it."""


def preset(name: str, factory: Callable[[], Any] | None = None) -> Experiment:
    """Return the experiment of a preset; an unknown name is refused with the nearest known one.

    A `factory` makes one Gymnasium environment; it goes with the name 'gym:' alone.
    """
    if factory is not None:
        if name != FACTORY:
            raise ConfigError(f"a function that makes environments goes with the preset '{FACTORY}', not '{name}'")
        return registered(getattr(factory, "__name__", type(factory).__name__), factory)
    if name in PRESETS:
        return PRESETS[name]()
    prefix, colon, rest = name.partition(":")
    if not colon and prefix not in PREFIXES:
        known = ", ".join([*PRESETS, *_forms()])
        raise ConfigError(f"unknown preset '{name}'.{did_you_mean(name, PRESETS)} Known: {known}, module:function")
    if prefix not in PREFIXES:
        return _imported(prefix, rest)
    what, build = PREFIXES[prefix]
    if not rest:
        raise ConfigError(f"preset '{name}' is incomplete: write {prefix}:{what}, as in {_EXAMPLES[prefix]}")
    if prefix == "gym" and (rest in PRESETS or rest.partition(":")[0] in PREFIXES):
        raise ConfigError(f"'{rest}' is a preset, not the id of an environment: qfleet.train('{rest}')")
    return build(rest)


def describe() -> dict[str, str]:
    """Return one line about each preset and each form with a prefix, by what a user writes."""
    functions = {**PRESETS, **_forms()}
    return {name: (inspect.getdoc(function) or "").partition("\n")[0] for name, function in functions.items()}


_EXAMPLES = {
    "minatar": "minatar:breakout",
    "atari": "atari:pong",
    "atari-fast": "atari-fast:pong",
    "gym": "gym:CartPole-v1",
}


def _forms() -> dict[str, Callable[[str], Experiment]]:
    return {f"{prefix}:{what}": build for prefix, (what, build) in PREFIXES.items()}


def _imported(module: str, function: str) -> Experiment:
    """Call `module:function`, which a user wrote to return an Experiment."""
    name = f"{module}:{function}"
    try:
        build = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # whatever a user's module may raise while it is imported
        hint = did_you_mean(module, PREFIXES)
        raise ConfigError(
            f"preset '{name}': the module '{module}' cannot be imported ({type(error).__name__}: {error}).{hint}"
            " Is its folder on PYTHONPATH?"
        ) from error
    if not callable(build):
        problem = f"has no function '{function}'" if build is None else f"has a '{function}' that cannot be called"
        raise ConfigError(
            f"preset '{name}': the module '{module}' {problem}; name a function that returns an Experiment"
        )
    try:
        experiment = build()
    except QfleetError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"preset '{name}': {function}() raised {problem}; it is called without arguments") from error
    if not isinstance(experiment, Experiment):
        found = type(experiment).__name__
        raise ConfigError(f"preset '{name}': {function}() returned a {found}; it must return a qfleet Experiment")
    return experiment if experiment.preset != "custom" else Experiment.model_validate(experiment.replace(preset=name))
