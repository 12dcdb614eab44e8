"""Errors of settings as a person reads them: dotted name, value, what is expected, nearest name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from qfleet.core.config import Config, describe, kind_of, models_in


class Fast(Config):
    kind: Literal["fast"] = "fast"
    speed: float = Field(1.0, gt=0)
    """How fast."""


class Careful(Config):
    kind: Literal["careful"] = "careful"
    checks: tuple[Annotated[int, Field(ge=0)], ...] = (1, 2)
    limit: int | None = Field(None, gt=0)


class Part(Config):
    size: int = 3


class Whole(Config):
    way: Annotated[Fast | Careful, Field(discriminator="kind")] = Fast()
    part: Part | None = None
    options: dict[str, int] = Field(default_factory=dict)
    colour: Literal["red", "green"] = "red"
    name: str

    @model_validator(mode="after")
    def _agree(self) -> Whole:
        if self.colour == "green" and self.part is None:
            raise ValueError("colour 'green' needs part")
        return self


def problem(tree: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(tree)
    return describe(caught.value, Whole)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({}, "'name' is required"),
        ({"name": "x", "colur": "red"}, "unknown setting 'colur'. Did you mean 'colour'?"),
        ({"name": "x", "colour": "grene"}, "'colour' = 'grene': should be one of red, green. Did you mean 'green'?"),
        ({"name": "x", "way": {"kind": "fats"}},
         "'way.kind' = 'fats': should be one of fast, careful. Did you mean 'fast'?"),
        ({"name": "x", "way": {"speed": 1}}, "'way.kind' is required: one of fast, careful"),
        ({"name": "x", "way": {"kind": "fast", "sped": 1}}, "unknown setting 'way.sped'. Did you mean 'speed'?"),
        ({"name": "x", "way": {"kind": "fast", "speed": 0}}, "'way.speed' = 0: should be greater than 0"),
        ({"name": "x", "way": {"kind": "fast", "speed": float("nan")}}, "'way.speed' = nan: should be a finite number"),
        ({"name": "x", "way": {"kind": "careful", "checks": [1, -2]}},
         "'way.checks.1' = -2: should be greater than or equal to 0"),
        ({"name": "x", "way": {"kind": "careful", "limit": 0}}, "'way.limit' = 0: should be greater than 0"),
        ({"name": "x", "way": 3}, "'way' = 3: should be a group of settings (name: value)"),
        ({"name": "x", "part": {"sizze": 3}}, "unknown setting 'part.sizze'. Did you mean 'size'?"),
        ({"name": "x", "part": 3}, "'part' = 3: should be a group of settings (name: value)"),
        ({"name": "x", "colour": "green"}, "colour 'green' needs part"),
        (None, "None in place of a configuration: should be a group of settings (name: value)"),
    ],
)  # fmt: skip
def test_one_problem_in_one_line(tree: Any, text: str) -> None:
    assert problem(tree) == text


def test_several_problems_are_all_told() -> None:
    text = problem({"colour": "blue", "way": {"kind": "fast", "speed": "quick"}})
    assert "'way.speed' = 'quick'" in text
    assert "'colour' = 'blue'" in text
    assert "'name' is required" in text


def test_a_long_value_is_cut() -> None:
    assert len(problem({"name": ["x"] * 10_000})) < 200


def test_nothing_of_the_library_is_shown() -> None:
    for tree in ({}, 3, {"name": 1, "way": [], "part": "x", "options": {"a": "b"}, "extra": 1}):
        assert not {"pydantic", "http", "Input", "Value error"} & set(problem(tree).replace(":", " ").split())


def test_a_config_is_frozen_and_replaced_by_a_checked_copy() -> None:
    part = Part(size=4)
    with pytest.raises(ValidationError):
        part.size = 5  # type: ignore[misc]
    assert part.replace(size=5) == Part(size=5)
    with pytest.raises(ValidationError):
        part.replace(sizee=5)


def test_classes_and_kinds_of_a_union() -> None:
    assert models_in(Whole.model_fields["way"].annotation) == [Fast, Careful]
    assert models_in(Whole.model_fields["part"].annotation) == [Part]
    assert models_in(dict[str, int]) == []
    assert [kind_of(Fast), kind_of(Careful), kind_of(Part)] == ["fast", "careful", None]
