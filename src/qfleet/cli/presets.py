"""`qfleet presets`: lists the ready experiments and the algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qfleet.cli.flags import parse_options, wants_help
from qfleet.core.config import Config

USAGE = "qfleet presets"


class PresetsOptions(Config):
    """Flags of `presets`: none."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        print(f"usage: {USAGE}\n\nList the ready experiments (PRESET of `qfleet train`) and the algorithms (--algo).")
        return 0
    parse_options(PresetsOptions, words, "", USAGE)

    from qfleet.presets.algorithms import ALGORITHMS
    from qfleet.presets.registry import describe

    algorithms = {name: (change.__doc__ or "").partition("\n")[0] for name, change in ALGORITHMS.items()}
    print("presets (qfleet train PRESET):")
    print(_table({**describe(), "module:function": "A function of your own that returns an Experiment."}))
    print("\nalgorithms (qfleet train PRESET --algo NAME):")
    print(_table(algorithms))
    return 0


def _table(lines: Mapping[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines.items())
