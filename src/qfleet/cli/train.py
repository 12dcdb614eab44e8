"""`qfleet train`: trains one preset with one or several seeds, shows how it goes, and says what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from qfleet.cli.errors import INTERRUPTED, WATCH, crash_file_in
from qfleet.cli.flags import Given, own_options, split_words, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config
from qfleet.core.errors import ConfigError

if TYPE_CHECKING:
    from qfleet.experiment import Experiment

USAGE = "qfleet train PRESET [--flag VALUE ...]"
_COMMON = """\
usage: qfleet train PRESET [--flag VALUE ...]

PRESET is a name that `qfleet presets` lists, `gym:ID` for a registered environment, or `module:function` for your own.

  --seed N                 every random number of the run derives from this
  --seeds K                train K seeds (seed, seed + 1, ...) and report the aggregate
  --run-dir DIR            where the run's files go; a new directory under runs/ by default
  --env-steps N            steps in all environments together, after which the run ends
  --target SCORE           stop when evaluations reach this score; exit code 4 if they never do
  --algo NAME              another algorithm; `qfleet presets` lists them
  --topology KIND          auto, pipeline or fused
  --placement WHERE        inline (this process), processes (this machine) or ray (a cluster)
  --address RAY            the Ray cluster to join
  --actors N               how many actors play, or auto
  --plan PLAN              auto: measure this machine and arrange the roles (the default of processes); or a saved plan
  --learners N             how many learners share each update
  --device DEVICE          cpu, cuda, mps, xpu or auto
  --quiet                  no progress, no result on the terminal

Every setting is a flag: `qfleet train PRESET --help` lists all of a preset's with their values.
example: qfleet train cartpole --seed 1 --optim.lr 5e-4 --network.hidden 64 64

Exit codes: 0 finished, 2 bad configuration, 3 failed, 4 target not met, 130 stopped by Ctrl-C (and saved)."""


class TrainOptions(Config):
    """Flags of `train` that are not settings of the experiment."""

    seeds: int = Field(1, gt=0, le=10_000)
    """Train this many seeds (seed, seed + 1, ...) one after the other and report the aggregate."""
    run_dir: Path | None = None
    """Where the run's files go; by default a new directory under runs/."""
    algo: str | None = None
    """Change the preset to another algorithm; `qfleet presets` lists them."""
    plan: str | None = None
    """auto, or the file of a plan that `qfleet plan --save` wrote; auto is the default of --placement processes."""
    quiet: bool = False
    """Show neither progress nor result."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    loose, given = split_words([word for word in words if word not in ("--help", "-h")])
    options, rest, behind = own_options(TrainOptions, given)
    loose += behind
    if wants_help(words) and not loose:
        print(_COMMON)
        return 0
    if len(loose) != 1:
        raise _wrong_words(loose, given)
    experiment = named_experiment(loose[0], options.algo)
    if wants_help(words):
        print(_help(experiment, loose[0]))
        return 0

    WATCH.note = "nothing was saved"
    from qfleet.cli.overrides import override

    rest, automatic = without_auto(rest)
    experiment, changes = override(experiment, rest, own=list(TrainOptions.model_fields))
    if options.plan is None and (automatic or (experiment.beside and "actors" not in changes)):
        options = options.replace(plan="auto")
    if options.seeds > 1:
        return _train_seeds(experiment, options, changes)
    from qfleet import api

    return _train_one(experiment, options.run_dir or api.default_run_dir(experiment), options, changes)[0]


def without_auto(given: Sequence[Given]) -> tuple[list[Given], bool]:
    """Return the flags but for `--actors auto`, which is no number, and whether it was there."""
    rest = [flag for flag in given if (flag.name, flag.texts) != ("actors", ("auto",))]
    return rest, len(rest) < len(given)


def _wrong_words(loose: Sequence[str], given: Sequence[Given]) -> ConfigError:
    if len(loose) > 1:
        return ConfigError(f"unexpected '{loose[1]}' after preset '{loose[0]}'; usage: {USAGE}")
    where = "first, before the flags" if given else "first"
    return ConfigError(f"PRESET is missing: name it {where}, as in: qfleet train cartpole --seed 1")


def named_experiment(name: str, algo: str | None) -> Experiment:
    """Return a preset, with another algorithm if one is named."""
    from qfleet.presets import algorithms, preset

    experiment = preset(name)
    return experiment if algo is None else algorithms.apply(experiment, algo)


def _help(experiment: Experiment, name: str) -> str:
    from qfleet.cli.overrides import visible_settings

    about = f"All settings of the preset '{name}' with its values; another --SECTION.kind brings that kind's settings."
    usage = f"qfleet train {name} [--flag VALUE ...]"
    return help_page(usage, about, settings_of(TrainOptions, {}), visible_settings(experiment))


def _train_one(
    experiment: Experiment, run_dir: Path, options: TrainOptions, changes: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Train one seed; returns the exit code and the run's summary."""
    from qfleet import api
    from qfleet.cli.panel import make_console_sink
    from qfleet.cli.results import exit_code, show_run

    with crash_file_in(run_dir):
        sinks = [make_console_sink(options.quiet)]
        finished = api.train(experiment, run_dir=run_dir, plan=options.plan, fixed=changes, sinks=sinks)
    show_run(finished.summary, finished.dir, options.quiet)
    return exit_code(finished.summary, "evaluation.target" in changes), finished.summary


def _train_seeds(experiment: Experiment, options: TrainOptions, changes: dict[str, Any]) -> int:
    """Train several seeds into directories of their own, then write and show what they say together."""
    from qfleet import api
    from qfleet.cli.results import aggregate, show_aggregate
    from qfleet.experiment import with_changes
    from qfleet.runtime.rundir import RunDir, write_atomically

    top = options.run_dir or api.default_run_dir(experiment)
    experiments = [with_changes(experiment, {"seed": experiment.seed + i}) for i in range(options.seeds)]
    taken = [path for path in (top, *(top / f"seed-{e.seed}" for e in experiments)) if (path / "config.yaml").exists()]
    if taken:
        raise ConfigError(f"{taken[0]} already holds a run: choose another directory by --run-dir")
    codes, summaries = [], []
    for one in experiments:
        code, summary = _train_one(one, top / f"seed-{one.seed}", options, changes)
        if code == INTERRUPTED:
            return code
        codes.append(code)
        summaries.append(summary)
    result = aggregate(summaries)
    write_atomically(RunDir(top).summary, json.dumps(result, indent=1) + "\n")
    show_aggregate(result, top, options.quiet)
    return max(codes)
