"""`qfleet plan`: measures this machine for a preset and shows how its roles are best arranged; starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qfleet.cli.flags import own_options, split_words, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.cli.train import named_experiment, without_auto
from qfleet.core.config import Config
from qfleet.core.errors import ConfigError
from qfleet.observe.text import rate

if TYPE_CHECKING:
    from qfleet.control.plan import Plan

USAGE = (
    "qfleet plan PRESET [--save FILE] [--several] [--simulate actors=N,learners=N] [--fresh] [--algo NAME]"
    " [--section.field VALUE ...]"
)
_ABOUT = (
    "Measure what a run costs on this machine (about 30 seconds, remembered) and show how its roles are best arranged,"
    " how fast that will be, and why. Nothing is trained. All flags of `qfleet train PRESET` are taken too; settings"
    " that are given stay as they are. Without --placement the faster one is shown."
)


_PROBLEM = "problem"


class PlanOptions(Config):
    """Flags of `plan` that are not settings of the experiment."""

    save: Path | None = None
    """Write the plan into this file, for `qfleet train PRESET --plan FILE`."""
    fresh: bool = False
    """Measure anew, in place of what an earlier plan measured."""
    several: bool = False
    """Show how several learners would best share an update on this machine, beside all other ways, in place of the
    arrangement of the roles."""
    simulate: str | None = None
    """Show what a cluster would do with the run, as in actors=2000,learners=64, each role as fast as it is here."""
    algo: str | None = None
    """Change the preset to another algorithm; `qfleet presets` lists them."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        print(help_page(USAGE, _ABOUT, settings_of(PlanOptions, {})))
        return 0
    loose, given = split_words(words)
    options, rest, behind = own_options(PlanOptions, given)
    loose += behind
    if len(loose) != 1:
        raise ConfigError(f"{f'unexpected {loose[1]!r}' if loose else 'PRESET is missing'}; usage: {USAGE}")

    from qfleet import api
    from qfleet.cli.overrides import override

    flags, _ = without_auto(rest)
    experiment = named_experiment(loose[0], options.algo)
    experiment, changes = override(experiment, flags, own=list(PlanOptions.model_fields))

    def say(text: str) -> None:
        print(f"  {text} ...", file=sys.stderr)

    if options.save is not None and (options.several or options.simulate is not None):
        raise ConfigError(
            "'--save' keeps the arrangement of roles: not with --several, which prints flags for `qfleet train`, or"
            " --simulate, which is of another cluster"
        )
    if options.several and options.simulate is not None:
        raise ConfigError("'--several' is about this machine, '--simulate' about another cluster: give one of them")
    if options.several or options.simulate is not None:
        print(api.plan_learners(experiment, simulate=options.simulate or "", fresh=options.fresh, say=say))
        return 0
    made = api.plan(experiment, fixed=changes, fresh=options.fresh, say=say)
    show(made, Console(highlight=False))
    if options.save is not None:
        _save(made, options.save)
    return 0


def show(plan: Plan, console: Console) -> None:
    """Print a plan: its roles, its rates, and why."""
    title = f"{plan.preset} ({plan.algo}), {plan.placement}"
    if plan.resources is not None:
        machine = plan.resources
        title += f" on {machine.cores:g} cores{f' and {machine.gpu}' if machine.gpu else ''}"
        title += f" (the first of {len(machine.gpus)} GPUs)" if len(machine.gpus) > 1 else ""
    console.print(Text(title, style="bold"))
    console.print(_roles(plan))
    told = list(_told(plan))
    width = max(len(name) for name, _ in told)
    _list(told, width, console)
    if plan.measurements is not None and plan.resources is not None:
        from qfleet.control.measurements_text import told as measured_told  # here, as it loads much

        curve = plan.measurements.env_tick
        envs = int(plan.settings.get("actor.envs", curve[len(curve) // 2][0]))
        console.print(Text("measured on this machine", style="bold"))
        _list(measured_told(plan.measurements, plan.resources, envs), width, console)


def _list(told: Iterable[tuple[str, str]], width: int, console: Console) -> None:
    for name, text in told:
        style = "red" if name == _PROBLEM else ""
        console.print(Text.assemble((f"  {name:<{width}}  ", "dim"), (text, style)), soft_wrap=True)


def _told(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what there is to say of a plan, each with its name."""
    if plan.env_steps_per_s is not None:
        speed = f"{rate(plan.env_steps_per_s)} steps/s, {rate(plan.updates_per_s or 0.0)} updates/s"
        yield "predicted", f"{speed}, evaluations left out"
    yield "bottleneck", plan.bottleneck
    yield from plan.reasons.items()
    yield from ((_PROBLEM, text) for text in plan.problems)


def _roles(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("  role", no_wrap=True)
    for heading in ("count", "device", "cores", "busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for role in plan.roles:
        table.add_row(f"  {role.kind}", str(role.count), role.device, f"{role.cores:.1f}", f"{min(role.busy, 1.0):.0%}")
    return table


def _save(plan: Plan, path: Path) -> None:
    from qfleet.runtime.rundir import write_atomically

    try:
        write_atomically(path, plan.to_yaml())
    except OSError as error:
        raise ConfigError(f"'--save' = '{path}': cannot be written ({error.strerror})") from error
    print(f"kept in {path}: qfleet train {plan.preset} --plan {path}")
