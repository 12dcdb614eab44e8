"""The settings that a tree of `Config` classes has under given kinds, as a flat list of dotted names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from qfleet.core.config import kind_of, models_in

REQUIRED = object()
"""The default of a setting that has none."""
ON = "on"
"""What switches an optional section on, with its defaults."""


@dataclass(frozen=True)
class Setting:
    """One value that can be set."""

    name: str
    """Dotted name with underscores, as in config.yaml."""
    annotation: Any
    help: str
    default: Any
    section: bool = False
    """Whether this is the switch of an optional section rather than a value."""


def settings_of(model: type[BaseModel], tree: Mapping[str, Any], prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of `model`; `tree` holds present values (plain ones) and so decides about kinds."""
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        value = tree[name] if name in tree else _default(field)
        dotted, text = f"{prefix}{name}", field.description or ""
        models = models_in(field.annotation)
        if not models:
            yield Setting(dotted, field.annotation, text, value)
            continue
        if type(None) in get_args(field.annotation):
            shown = None if value is None else ON
            yield Setting(dotted, Literal["on"] | None, f"{text} '{ON}' takes the defaults.", shown, section=True)
        if value is not None:
            yield from _section(models, {} if value is REQUIRED else value, text, f"{dotted}.")


def _section(models: list[type[BaseModel]], tree: Mapping[str, Any], text: str, prefix: str) -> Iterator[Setting]:
    kinds = [kind for kind in map(kind_of, models) if kind is not None]
    chosen = next((model for model in models if kind_of(model) == tree.get("kind")), models[0])
    for setting in settings_of(chosen, tree, prefix):
        if kinds and setting.name == f"{prefix}kind":
            yield Setting(
                setting.name, Literal[tuple(kinds)], f"{text} {_first_line(chosen)}", tree.get("kind", REQUIRED)
            )
        else:
            yield setting


def kinds_with(model: type[BaseModel], name: str) -> tuple[str, list[str]]:
    """Return the dotted kind setting that decides whether a setting exists, and the kinds under which it does."""
    models, path = [model], name.split(".")
    for at, part in enumerate(path):
        having = [m for m in models if part in m.model_fields]
        kinds = [kind for kind in map(kind_of, having) if kind is not None]
        if not having or (at == len(path) - 1):
            return ".".join([*path[:at], "kind"]), kinds
        models = [found for m in having for found in models_in(m.model_fields[part].annotation)]
    return "", []


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True, validated_data={})
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().split("\n")[0]


def expected(annotation: Any) -> str:
    """Return what a value of this type looks like, in words that follow "should be"."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin is Annotated:
        return expected(arguments[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        count = "values" if arguments[-1] is ... else f"{len(arguments)} values"
        return f"{count}, each {expected(arguments[0])}"
    if origin is dict:
        return "pairs of a name and a value"
    if arguments:
        words = [expected(argument) for argument in arguments if argument is not type(None)]
        return " or ".join([*dict.fromkeys(words), *(["None"] if type(None) in arguments else [])])
    return "a value"


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    Path: "a path",
}
