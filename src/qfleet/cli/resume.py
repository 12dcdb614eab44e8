"""`qfleet resume`: goes on with a run from its newest good checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from qfleet.cli.errors import crash_file_in
from qfleet.cli.flags import parse_options, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config

USAGE = "qfleet resume RUN_DIR [--env-steps N] [--quiet]"


class ResumeOptions(Config):
    """Flags of `resume`."""

    run_dir: Path
    """The directory of the run."""
    env_steps: int | None = Field(None, gt=0)
    """Go on to this many steps in all, instead of the run's own budget."""
    quiet: bool = False
    """Show neither progress nor result."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        options = [setting for setting in settings_of(ResumeOptions, {}) if setting.name != "run_dir"]
        print(help_page(USAGE, "Go on with a run from its newest good checkpoint.", options))
        return 0
    given = parse_options(ResumeOptions, words, "run_dir", USAGE)

    from qfleet import api
    from qfleet.cli.panel import make_console_sink
    from qfleet.cli.results import exit_code, show_run

    with crash_file_in(given.run_dir):
        finished = api.resume(given.run_dir, env_steps=given.env_steps, sinks=[make_console_sink(given.quiet)])
    show_run(finished.summary, finished.dir, given.quiet)
    return exit_code(finished.summary, target_given=False)
