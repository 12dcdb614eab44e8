"""`qfleet resume`: goes on with a run from its newest good checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from qfleet.cli.errors import crash_file_in
from qfleet.cli.flags import Given, parse_options, split_words, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config
from qfleet.core.errors import ConfigError

USAGE = (
    "qfleet resume RUN_DIR|ADDRESS [--env-steps N] [--placement P] [--learners N] [--parallel.SETTING VALUE] [--quiet]"
)
_PLAN = "parallel."


class ResumeOptions(Config):
    """Flags of `resume`."""

    run_dir: Path | str
    """The directory of the run, or the address that it was copied to (checkpoint.target)."""
    into: Path | None = None
    """Where a run that is named by an address goes on; a directory under runs/ by default."""
    env_steps: int | None = Field(None, gt=0)
    """Go on to this many steps in all, instead of the run's own budget."""
    placement: Literal["inline", "processes", "ray"] | None = None
    """Go on with the same roles in this placement, instead of the run's own."""
    learners: int | None = Field(None, gt=0)
    """Go on with so many learners, or workers of parameter servers, instead of the run's own."""
    quiet: bool = False
    """Show neither progress nor result."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        options = [setting for setting in settings_of(ResumeOptions, {}) if setting.name != "run_dir"]
        about = (
            "Go on with a run from its newest good checkpoint. Settings of `parallel` may be others from then on; all"
            " other settings are the run's own."
        )
        print(help_page(USAGE, about, options))
        return 0
    words, plan = _divided(words)
    given = parse_options(ResumeOptions, words, "run_dir", f"{USAGE} (all other settings are the run's own)")

    from qfleet import api
    from qfleet.cli.panel import make_console_sink
    from qfleet.cli.results import exit_code, show_run

    run_dir = _directory(given)
    before = _steps_at_its_end(run_dir)
    with crash_file_in(run_dir):
        finished = api.resume(
            run_dir,
            env_steps=given.env_steps,
            placement=given.placement,
            learners=given.learners,
            parallel=_read(plan, run_dir),
            sinks=[make_console_sink(given.quiet)],
        )
    show_run(finished.summary, finished.dir, given.quiet)
    if not given.quiet and before is not None and finished.summary["env_steps"] == before:
        further = 2 * max(before, _budget(finished.dir))
        print(f"nothing was left to do; to train further: qfleet resume {finished.dir} --env-steps {further}")
    return exit_code(finished.summary, target_given=False)


def _directory(given: ResumeOptions) -> Path:
    """Return where the run is, which is copied there first if it was named by an address."""
    from qfleet import api
    from qfleet.runtime.faraway import is_address

    if is_address(str(given.run_dir)):
        return api.fetch(str(given.run_dir), given.into)
    if given.into is not None:
        raise ConfigError(f"'--into' is for the address of a run; '{given.run_dir}' is a directory, used where it is")
    return Path(given.run_dir)


def _divided(words: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Return the words but for settings of the plan, and these."""
    loose, given = split_words(words)
    plan = [flag for flag in given if flag.name.startswith(_PLAN)]
    behind = [text for flag in plan for text in flag.texts[1:]]
    rest = [word for flag in given if flag not in plan for word in (flag.flag, *flag.texts)]
    return [*loose, *behind, *rest], [replace(flag, texts=flag.texts[:1]) for flag in plan]


def _read(plan: Sequence[Given], run_dir: Path) -> dict[str, Any] | None:
    """Return the settings of `parallel` that are to be others from now on; None if none is."""
    if not plan:
        return None
    from qfleet.cli.overrides import read_changes
    from qfleet.experiment import Experiment
    from qfleet.runtime.rundir import RunDir

    changes = read_changes(Experiment.from_yaml(RunDir.existing(run_dir).config), plan)
    return {name.removeprefix(_PLAN): value for name, value in changes.items()}


def _budget(run_dir: Path) -> int:
    """Return the steps that a run may make, which one that reached its target has not made."""
    from qfleet.experiment import Experiment
    from qfleet.runtime.rundir import RunDir

    return Experiment.from_yaml(RunDir(run_dir).config).env_steps


def _steps_at_its_end(run_dir: Path) -> int | None:
    """Return the steps that a run had when it last came to an end; None if it never did."""
    try:
        return int(json.loads((run_dir / "summary.json").read_text())["env_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
