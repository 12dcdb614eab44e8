"""Writes docs/settings.md, the reference of all settings, from the classes that define them; run it after a change."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from qfleet.cli.flags import flag_of
from qfleet.cli.settings import expected
from qfleet.core.config import kind_of, models_in
from qfleet.experiment import Experiment

PAGE = Path(__file__).with_name("settings.md")
HIDDEN = ("format", "preset", "algo")
"""Fields that tell what an experiment is, and are not for setting."""
LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
OPENING = """\
# Settings

Every setting of a run, with its default. Each one is a flag of `qfleet train` (`--optim.lr 5e-4`), a keyword of
`qfleet.train` (`optim={"lr": 5e-4}`) and a line of the run's `config.yaml`. Presets have values of their own:
`qfleet train PRESET --help` shows them.

Some sections come in several kinds. `--SECTION.kind NAME` selects one, with its defaults; only that kind's settings
exist then. Tuples take several words (`--network.hidden 64 64`), booleans `True` or `False`, and `None` is written so.

This page is written by `docs/make_settings.py`; a test fails when it is out of date.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join([OPENING, *_group(Experiment, "", set())]).rstrip() + "\n"


def _group(model: type[BaseModel], prefix: str, seen: set[tuple[str, type[BaseModel]]]) -> Iterator[str]:
    """Yield the table of a class's own values, then the sections below it; a section that recurs is told once."""
    rows, below = [], []
    for name, field in model.model_fields.items():
        models = models_in(field.annotation)
        if models:
            below.append((f"{prefix}{name}", field, models))
        elif not (name == "kind" and prefix) and not (name in HIDDEN and not prefix):
            rows.append(
                f"| `{flag_of(prefix + name)}` | {_default(field)} | {_values(field)} | {_line(field.description)} |"
            )
    yield from (
        ["| flag | default | value | meaning |", "|---|---|---|---|", *rows, ""] if rows else ["No settings.", ""]
    )
    for dotted, field, models in below:
        for part in models:
            if (dotted, part) not in seen:
                seen.add((dotted, part))
                yield from _section(dotted, field, part, default=_kind_by_default(field))
                yield from _group(part, f"{dotted}.", seen)


def _section(dotted: str, field: FieldInfo, model: type[BaseModel], default: str | None) -> Iterator[str]:
    kind, level = kind_of(model), "#" * min(2 + dotted.count("."), 4)
    if kind is None:
        yield from [f"{level} {dotted}", ""]
    else:
        mark = " (default)" if kind == default else ""
        yield from [f"{level} {flag_of(dotted)}.kind {kind}{mark}", ""]
    optional = f" Off by default; `{flag_of(dotted)} on` switches it on." if field.default is None else ""
    what, which = _line(field.description), _line((model.__doc__ or "").split("\n\n")[0])
    about = which if which.startswith(what) else f"{what} {which}"
    yield from [f"{about}{optional}", ""]


def _kind_by_default(field: FieldInfo) -> str | None:
    return None if field.is_required() or field.default is None else kind_of(type(field.default))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return f"`{value}`" if value not in ("", {}) else "empty"


def _values(field: FieldInfo) -> str:
    limits = [
        f"{words} {getattr(item, limit):,}"
        for item in field.metadata
        for limit, words in LIMITS.items()
        if getattr(item, limit, None) is not None
    ]
    return _line(", ".join([expected(field.annotation), *limits]))


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
