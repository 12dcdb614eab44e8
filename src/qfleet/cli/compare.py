"""`qfleet compare`: a table of several runs, and their learning curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qfleet.cli.flags import parse_options, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config
from qfleet.core.errors import ConfigError

USAGE = "qfleet compare RUN_DIR ... [--output FILE.png]"


class CompareOptions(Config):
    """Flags of `compare`."""

    runs: tuple[Path, ...]
    """Directories of runs, or of several seeds."""
    output: Path | None = None
    """Draw the learning curves with their intervals into this .png file (extra: plot)."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        options = [setting for setting in settings_of(CompareOptions, {}) if setting.name != "runs"]
        print(help_page(USAGE, "Show runs side by side; runs that differ in their seed only form a group.", options))
        return 0
    given = parse_options(CompareOptions, words, "runs", USAGE)

    if not given.runs:
        raise ConfigError(f"there is nothing to compare; usage: {USAGE}")

    from qfleet.observe.compare import compare

    comparison = compare(given.runs, given.output)
    print(comparison.table())
    if comparison.figure is not None:
        print(f"learning curves: {comparison.figure}")
    return 0
