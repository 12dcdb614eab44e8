"""Applies a command line's flags to an experiment: first what selects sections, then every other setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qfleet.cli.flags import Given, read_value, unknown_flag
from qfleet.cli.settings import REQUIRED, Setting, kinds_with, settings_of
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment, parse_experiment, place_learners

ALIASES = {"target": "evaluation.target"}
"""Short flags of settings that lie deeper."""
HIDDEN = ("format", "preset", "algo")
"""Fields that tell what an experiment is, and are not for setting."""

Tree = dict[str, Any]


def override(experiment: Experiment, given: Sequence[Given], own: Sequence[str]) -> tuple[Experiment, Tree]:
    """Return the experiment with all flags applied, and the changed values by dotted name.

    Nothing is checked across settings before all are set, so that the order of flags does not matter. `own` names the
    verb's own options, which a misspelt flag may have meant.
    """
    tree, changes = _changed(experiment, given, own)
    place_learners(tree, changes)
    return parse_experiment(tree, "settings"), changes


def read_changes(experiment: Experiment, given: Sequence[Given]) -> Tree:
    """Return the values that flags give an experiment's settings, by dotted name; whether they fit is not checked."""
    return _changed(experiment, given, ())[1]


def _changed(experiment: Experiment, given: Sequence[Given], own: Sequence[str]) -> tuple[Tree, Tree]:
    """Return the experiment's values with all flags applied, and the changed ones by dotted name."""
    tree = experiment.model_dump(mode="json")
    flags = {ALIASES.get(flag.name, flag.name): flag for flag in given}
    if len(flags) < len(given):
        raise ConfigError("'--target' and '--evaluation.target' are the same setting; give one of them")
    changes: Tree = {}
    settings = _settings(tree)
    for name in sorted(flags, key=lambda name: name.count(".")):
        setting = settings.get(name)
        if setting is not None and (setting.section or name.rpartition(".")[2] == "kind"):
            changes[name] = read_value(setting, flags[name], flags[name].texts)
            _select(tree, setting, changes[name])
        elif name.rpartition(".")[0] in changes or not _switch_on(tree, name, settings):
            continue
        settings = _settings(tree)
        tree = _complete(tree, settings)
    for name in flags:
        if name not in settings:
            raise _no_such_flag(flags[name], name, settings, own)
    for name in [name for name in flags if name not in changes]:
        changes[name] = read_value(settings[name], flags[name], flags[name].texts)
        _put(tree, name, changes[name])
    return tree, changes


def visible_settings(experiment: Experiment) -> list[Setting]:
    """Return every setting that can be given as a flag, with the experiment's values as defaults."""
    return list(_settings(experiment.model_dump(mode="json")).values())


def _settings(tree: Tree) -> dict[str, Setting]:
    return {setting.name: setting for setting in settings_of(Experiment, tree) if setting.name not in HIDDEN}


def _complete(tree: Tree, settings: dict[str, Setting]) -> Tree:
    """Return the tree with the defaults of sections that were just selected, so that any of them can be changed."""
    complete: Tree = {name: tree[name] for name in HIDDEN}
    for setting in settings.values():
        if setting.default is not REQUIRED and not (setting.section and setting.default is not None):
            _put(complete, setting.name, setting.default)
    return complete


def _put(tree: Tree, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _select(tree: Tree, setting: Setting, value: str | None) -> None:
    """Make a section one of another kind, or switch an optional one on or off; a new section has its defaults."""
    if value == setting.default:
        return
    if setting.section:
        _put(tree, setting.name, None if value is None else {})
    else:
        _put(tree, setting.name.rpartition(".")[0], {"kind": value})


def _switch_on(tree: Tree, name: str, settings: dict[str, Setting]) -> bool:
    """Give an optional section its defaults when one of its settings is set; returns whether that was so."""
    setting = settings.get(name.rpartition(".")[0])
    if setting is None or not setting.section or setting.default is not None:
        return False
    _put(tree, setting.name, {})
    return True


def _no_such_flag(flag: Given, name: str, settings: dict[str, Setting], own: Sequence[str]) -> ConfigError:
    selector, kinds = kinds_with(Experiment, name)
    if kinds and selector in settings:
        present = settings[selector].default
        return ConfigError(
            f"'{flag.flag}' goes with --{selector} {' or '.join(kinds)}, but {selector} is '{present}' here"
        )
    return unknown_flag(flag, [*settings, *own, *ALIASES])
