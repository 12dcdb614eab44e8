"""The base of every settings class: frozen, typed, closed to unknown keys, with errors a person can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticUndefined

from qfleet.core.errors import did_you_mean

_SHOWN = 80
"""Characters of a wrong value that an error shows."""


class Config(BaseModel):
    """A frozen group of settings; lives in the file of the class that it configures."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def replace(self, **changes: Any) -> Any:
        """Return a validated copy with some fields changed; sub-configs may be given as instances or dicts."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **changes})


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the settings classes that occur in a type, such as the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def kind_of(model: type[BaseModel]) -> str | None:
    """Return the `kind` that selects this class among others, or None if it has none."""
    field = model.model_fields.get("kind")
    return None if field is None else str(field.default)


def completed(model: type[BaseModel], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain settings with the defaults of all that they leave out, each section by its kind; checks nothing."""
    result = dict(tree)
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if name not in result and default is not PydanticUndefined:
            result[name] = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        if models := models_in(field.annotation) if isinstance(result.get(name), Mapping) else []:
            fallback = kind_of(type(default)) if isinstance(default, BaseModel) else kind_of(models[0])
            kind = result[name].get("kind", fallback)
            section = {"kind": kind, **result[name]} if kind is not None else result[name]
            chosen = [m for m in models if kind_of(m) == kind]
            result[name] = completed(chosen[0], section) if chosen else section
    return result


def describe(error: ValidationError, model: type[Config]) -> str:
    """Return what is wrong, one problem after the other: dotted name, value, reason, and the nearest valid name."""
    return "; ".join(dict.fromkeys(_problem(item, model) for item in error.errors(include_url=False)))


def _problem(item: Any, model: type[Config]) -> str:
    name, known = _dotted(item["loc"], model)
    value, reason = item["input"], item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    match item["type"]:
        case "extra_forbidden":
            return f"unknown setting '{name}'.{did_you_mean(name.rpartition('.')[2], known)}"
        case "missing":
            return f"'{name}' is required"
        case "value_error" if isinstance(value, BaseModel | dict):
            return f"{name}: {reason}" if name else str(reason)
        case "union_tag_invalid":
            kinds = [part.strip("' ") for part in item["ctx"]["expected_tags"].split(",")]
            tag = str(item["ctx"]["tag"])
            return f"'{name}.kind' = {_shown(tag)}: should be one of {', '.join(kinds)}.{did_you_mean(tag, kinds)}"
        case "union_tag_not_found":
            kinds = [kind for kind in map(kind_of, _models_at(item["loc"], model)) if kind is not None]
            return f"'{name}.kind' is required: one of {', '.join(kinds)}"
        case "model_type" | "model_attributes_type":
            what = f"'{name}' = {_shown(value)}" if name else f"{_shown(value)} in place of a configuration"
            return f"{what}: should be a group of settings (name: value)"
        case "literal_error":
            known = [part.strip("' ") for part in item["ctx"]["expected"].replace(" or ", ",").split(",")]
            return f"'{name}' = {_shown(value)}: should be one of {', '.join(known)}.{did_you_mean(str(value), known)}"
    return f"'{name}' = {_shown(value)}: {reason[:1].lower()}{reason[1:]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _dotted(location: tuple[int | str, ...], model: type[BaseModel]) -> tuple[str, list[str]]:
    """Return the dotted name of a location without the union tags in it, and the names valid at its last level."""
    models: list[type[BaseModel]] = [model]
    parts: list[str] = []
    known: list[str] = []
    for part in location:
        fields = {name: field for m in models for name, field in m.model_fields.items()}
        if part in fields:
            known, models = list(fields), models_in(fields[str(part)].annotation)
            parts.append(str(part))
        elif tagged := [m for m in models if kind_of(m) == part]:
            models = tagged
        elif models or isinstance(part, int):
            known, models = list(fields), []
            parts.append(str(part))
        # What is left names a member of a plain union, or a key: pydantic tells of each member by itself.
    return ".".join(parts), known


def _models_at(location: tuple[int | str, ...], model: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the classes that are possible at a location."""
    models = [model]
    for part in location:
        fields = {name: field for m in models for name, field in m.model_fields.items()}
        if part in fields:
            models = models_in(fields[str(part)].annotation)
    return models
