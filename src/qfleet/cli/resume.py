"""`qfleet resume`: goes on with a run from its newest good checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from qfleet.cli.errors import crash_file_in
from qfleet.cli.flags import parse_options, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config

USAGE = "qfleet resume RUN_DIR [--env-steps N] [--placement P] [--quiet]"


class ResumeOptions(Config):
    """Flags of `resume`."""

    run_dir: Path
    """The directory of the run."""
    env_steps: int | None = Field(None, gt=0)
    """Go on to this many steps in all, instead of the run's own budget."""
    placement: Literal["inline", "processes", "ray"] | None = None
    """Go on with the same roles in this placement, instead of the run's own."""
    quiet: bool = False
    """Show neither progress nor result."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        options = [setting for setting in settings_of(ResumeOptions, {}) if setting.name != "run_dir"]
        print(help_page(USAGE, "Go on with a run from its newest good checkpoint.", options))
        return 0
    given = parse_options(ResumeOptions, words, "run_dir", f"{USAGE} (all other settings are the run's own)")

    from qfleet import api
    from qfleet.cli.panel import make_console_sink
    from qfleet.cli.results import exit_code, show_run

    before = _steps_at_its_end(given.run_dir)
    with crash_file_in(given.run_dir):
        finished = api.resume(
            given.run_dir,
            env_steps=given.env_steps,
            placement=given.placement,
            sinks=[make_console_sink(given.quiet)],
        )
    show_run(finished.summary, finished.dir, given.quiet)
    if not given.quiet and before is not None and finished.summary["env_steps"] == before:
        print(f"nothing was left to do; to train further: qfleet resume {finished.dir} --env-steps {2 * before}")
    return exit_code(finished.summary, target_given=False)


def _steps_at_its_end(run_dir: Path) -> int | None:
    """Return the steps that a run had when it last came to an end; None if it never did."""
    try:
        return int(json.loads((run_dir / "summary.json").read_text())["env_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
