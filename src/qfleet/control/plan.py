"""A plan: where the roles of a run go and how many there are, with predictions and reasons; it can be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from qfleet.control.measurements import Measurements
from qfleet.control.resources import Resources
from qfleet.core.config import Config, describe
from qfleet.core.errors import ConfigError

_FIELDS_OF_ITS_OWN = ("preset", "algo", "placement")


class PlannedRole(Config):
    """All roles of one kind."""

    kind: str
    """Such as "actor"."""
    count: int = Field(gt=0)
    """How many there are."""
    cores: float = Field(ge=0)
    """Cores that they keep busy together at the predicted rate."""
    busy: float = Field(ge=0)
    """Share of the time that each of them works at that rate."""
    device: str = "cpu"
    """Where they compute."""


class Plan(Config):
    """What a planner decided for one experiment on one machine."""

    format: Literal[1] = 1
    """Version of this format."""
    preset: str
    """What the experiment was derived from."""
    algo: str
    """Its algorithm."""
    placement: Literal["inline", "processes"]
    """Where the roles live."""
    settings: dict[str, int | float | str]
    """The settings that the plan decides, by dotted name; the others stay as they are."""
    given: dict[str, Any] = Field(default_factory=dict)
    """The settings that it was asked for with, by dotted name: a run that follows the plan has them too."""
    roles: tuple[PlannedRole, ...] = ()
    """Who works; none in a plan that a person wrote."""
    env_steps_per_s: float | None = None
    """Predicted, evaluations left out; None where nothing was measured."""
    updates_per_s: float | None = None
    """Predicted."""
    bottleneck: str = ""
    """Which role, or the cores, limits the rate."""
    placements: dict[str, float] = Field(default_factory=dict)
    """Predicted environment steps a second of the best plan in each placement."""
    reasons: dict[str, str] = Field(default_factory=dict)
    """Why each number was chosen, by the setting's name or by what is spoken of."""
    problems: tuple[str, ...] = ()
    """Why the run cannot go like this; empty if it can."""
    resources: Resources | None = None
    """The machine that the plan is for."""
    measurements: Measurements | None = None
    """What the predictions come from."""

    def line(self) -> str:
        """Return the plan in one line, for a person."""
        chosen = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        rate = "" if self.env_steps_per_s is None else f"; about {self.env_steps_per_s:,.0f} steps/s are expected"
        limit = f", limited by {self.bottleneck}" if self.bottleneck else ""
        return f"{self.placement}: {chosen or 'as it is'}{rate}{limit}"

    def in_short(self) -> dict[str, Any]:
        """Return the plan as plain values, without what was measured for it."""
        return self.model_dump(mode="json", exclude={"measurements"})

    def to_yaml(self) -> str:
        """Return the plan as text that `from_yaml` reads back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @field_validator("settings")
    @classmethod
    def _about_arrangement(cls, settings: dict[str, int | float | str]) -> dict[str, int | float | str]:
        """Refuse settings that say what is run, and not how: it would be another experiment under the same name."""
        for name in settings:
            if name in _FIELDS_OF_ITS_OWN or name == "env.id" or name.startswith("env.kwargs"):
                raise ValueError(f"{name} is not for a plan's settings to say")
        return settings

    @classmethod
    def from_yaml(cls, path: Path) -> Plan:
        """Load a saved plan; refuses anything that is not one, naming the file and the field."""
        try:
            tree: Any = yaml.safe_load(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"there is no plan {path}; `qfleet plan PRESET --save {path}` makes one") from None
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as a plan ({error})") from error
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError(f"{path}: {describe(error, cls)}") from None
