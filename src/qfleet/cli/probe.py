"""`qfleet probe`: times the candidate settings of a run on this machine and keeps the fastest for later runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from qfleet.cli.flags import Given, own_options, split_words, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config
from qfleet.core.errors import ConfigError

if TYPE_CHECKING:
    from qfleet.control.probe import Candidate, Report
    from qfleet.experiment import Experiment
    from qfleet.roles.fused import FusedSetup

USAGE = "qfleet probe PRESET [--seconds-per-candidate S] [--algo NAME] [--section.field VALUE ...]"
_ABOUT = (
    "Time the settings of --accel on this machine (at most 3 minutes) and keep the fastest that computes the same"
    " gradient, for runs of this model on this hardware. All flags of `qfleet train PRESET` are taken too."
)


class ProbeOptions(Config):
    """Flags of `probe` that are not settings of the experiment."""

    seconds_per_candidate: float = Field(3.0, gt=0, le=60)
    """How long each candidate is timed."""
    algo: str | None = None
    """Change the preset to another algorithm; `qfleet presets` lists them."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        print(help_page(USAGE, _ABOUT, settings_of(ProbeOptions, {})))
        return 0
    loose, given = split_words(words)
    options, rest, behind = own_options(ProbeOptions, given)
    loose += behind
    if len(loose) != 1:
        raise ConfigError(f"{f'unexpected {loose[1]!r}' if loose else 'PRESET is missing'}; usage: {USAGE}")
    setup, threads = _setup(loose[0], options, rest)

    import torch

    from qfleet.control.probe import LIMIT_S, Clock, probe

    torch.set_num_threads(threads)
    clock = Clock(LIMIT_S)
    report = probe(setup, options.seconds_per_candidate, clock, lambda text: print(f"  {text} ...", file=sys.stderr))
    print("\n".join([*table(report), *_outcome(report, setup)]))
    return 0 if report.winner is not None else 3


def _setup(name: str, options: ProbeOptions, given: Sequence[Given]) -> tuple[FusedSetup, int]:
    """Return what the run's loop is built from, and its threads; refuses a run that is not one loop."""
    from qfleet.cli.overrides import override
    from qfleet.core.usercode import UserCode
    from qfleet.envs import env_spec
    from qfleet.presets import algorithms, preset
    from qfleet.setups import fused_setup

    experiment = preset(name)
    if options.algo is not None:
        experiment = algorithms.apply(experiment, options.algo)
    experiment, _ = override(experiment, given, own=list(ProbeOptions.model_fields))
    if not experiment.fused:
        raise ConfigError(_not_fused(name, experiment))
    return fused_setup(experiment, env_spec(experiment.env), UserCode()), experiment.threads


def _not_fused(name: str, experiment: Experiment) -> str:
    reason = experiment.why_not_fused
    because = f"the fused topology {reason}" if reason else "topology 'pipeline' was asked for"
    return (
        f"'{name}' runs as a pipeline, and probes time fused loops only: {because}. A pipeline's learner takes the"
        " shipped settings for its hardware, or those of --accel. Tensor-native games can be probed, such as"
        " minatar:breakout"
    )


def table(report: Report) -> list[str]:
    """Return the candidates as lines of a table, the fastest marked."""
    kind, winner = report.hardware.kind, report.winner
    words = [candidate.settings.words(kind) for candidate in report.candidates]
    width = max(map(len, words))
    lines = [f"{kind}: {report.hardware.name}", f"  {'settings':<{width}}  gradient  start s  learned steps/s"]
    for text, candidate in zip(words, report.candidates, strict=True):
        mark = "*" if candidate is winner else " "
        lines.append(f"{mark} {text:<{width}}  {_figures(candidate)}")
    return lines


def _figures(candidate: Candidate) -> str:
    if candidate.failure:
        return candidate.failure
    return f"{candidate.difference:8.1e}  {candidate.start_s:7.1f}  {candidate.rate:15,.0f}"


def _outcome(report: Report, setup: FusedSetup) -> list[str]:
    """Keep the winner; return what is to be said about it and about what else was tried."""
    from qfleet.control.probe import ALIKE
    from qfleet.observe.text import rate

    winner, eager = report.winner, report.candidates[0]
    if winner is None:
        return ["no candidate could be timed: nothing is kept"]
    why = f"probed on {time.strftime('%Y-%m-%d')}: {rate(winner.rate)} steps/s"
    if eager.rates and winner is not eager:
        why += f" against {rate(eager.rate)} eager"
    lines = [f"winner: {winner.settings.words(report.hardware.kind)} ({why})", _keep(report, setup, why)]
    for suggestion in report.suggestions:
        times = suggestion.rate / winner.rate
        label = "suggestion" if times > 1 + ALIKE else "no gain"
        lines.append(f"{label}: {suggestion.change} gives {rate(suggestion.rate)} steps/s ({times:.2f} times)")
    if any("envs" in suggestion.change for suggestion in report.suggestions):
        lines.append("  (more environments change what is learned; judge by a run's curve)")
    if report.untried:
        lines.append(f"not tried: {', '.join(report.untried)}")
    return lines


def _keep(report: Report, setup: FusedSetup, why: str) -> str:
    """Store the winner for later runs; return one line that says where, or why not."""
    from qfleet.accel import cache
    from qfleet.accel.choose import explicit, key_of
    from qfleet.roles.fused.choices import workload_of

    assert report.winner is not None
    if given := explicit(setup.accel):
        names = ", ".join(f"--accel.{name}" for name in given)
        return f"not kept: it is the best with {names} only"
    complaint = cache.read()[1]
    try:
        path = cache.store(key_of(report.hardware, workload_of(setup)), report.winner.settings, why)
    except OSError as error:
        return f"not kept: {cache.cache_path()} cannot be written ({error.strerror})"
    return f"kept in {path}" + (f" ({complaint})" if complaint else "")
