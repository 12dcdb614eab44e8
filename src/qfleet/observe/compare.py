"""Compares runs: groups them over seeds, and gives learning curves with intervals and a table of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qfleet.core.errors import ConfigError
from qfleet.core.seeding import numpy_stream
from qfleet.core.statistics import Estimate, estimate, iqm, mean_ci95
from qfleet.observe.plots import draw_curves
from qfleet.observe.runs import Numbers, Run, find_runs
from qfleet.observe.text import aligned, count, duration, number, rate

GRID_POINTS = 101


@dataclass(frozen=True)
class Curve:
    """A learning curve over the seeds of one group."""

    env_steps: Numbers  # [G]
    mean: Numbers  # [G]
    low: Numbers  # [G] of the 95 % bootstrap interval over seeds; the mean itself where there is one seed
    high: Numbers  # [G]
    shared_until: float
    """Where the shortest run ends; beyond, runs that have ended count with their last score."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    name: str
    preset: str
    runs: tuple[Run, ...]
    curve: Curve
    final_mean: Estimate
    final_iqm: Estimate
    solved: int
    """How many runs reached their target."""
    env_steps_to_target: float | None
    """Median over the runs that reached it; None when none did."""
    wall_s_to_target: float | None
    env_steps_per_s: float | None


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    groups: tuple[Group, ...]
    figure: Path | None
    """The PNG of the learning curves, when one was asked for."""

    def table(self) -> str:
        """Return the results as aligned plain text, one line for each group."""
        return table(self.groups)


def compare(runs: Sequence[Path], output: Path | None) -> Comparison:
    """Compare run directories by preset, algorithm, label and settings, with 95 % bootstrap intervals over seeds.

    A directory that holds `seed-1`, `seed-2`, ... has a label of its own. Runs form a group when all four agree and
    their seeds differ; where settings differ, the first of these name the groups. Where a seed repeats they cannot be
    samples of one thing, and each run stands for itself. Learning curves go into `output`, a PNG, unless it is None.
    """
    found = find_runs(runs)
    if not found:
        raise ConfigError(
            "there is nothing to compare; give the directories of runs, as in: qfleet compare runs/a runs/b"
        )
    groups = tuple(_group(members) for members in _grouped(found))
    if output is not None:
        draw_curves(groups, output)
    return Comparison(groups, output)


def learning_curve(runs: Sequence[Run]) -> Curve:
    """Return the mean score and its interval over runs, interpolated on one grid of environment steps.

    The grid begins where every run has been evaluated once and ends with the longest run.
    """
    first, last = max(run.env_steps[0] for run in runs), max(run.env_steps[-1] for run in runs)
    grid = np.unique(np.linspace(first, last, GRID_POINTS))
    scores = np.stack([np.interp(grid, run.env_steps, run.scores) for run in runs])
    rng = numpy_stream(0, "compare", purpose="curve")
    points = np.array([mean_ci95(column, rng) for column in scores.T])
    return Curve(grid, points[:, 0], points[:, 1], points[:, 2], float(min(run.env_steps[-1] for run in runs)))


def table(groups: Sequence[Group]) -> str:
    """Return one aligned line of results for each group, with what the columns mean below."""
    header = ("group", "runs", "final mean", "final IQM", "solved", "steps to target", "time to target", "steps/s")
    lines = aligned([header, *(_row(group) for group in groups)])
    lines.append("[low, high]: 95 % bootstrap interval over runs. To target, steps/s: medians over runs.")
    if any(not run.finished for group in groups for run in group.runs):
        lines.append("*: with last validation scores, for runs that have no final evaluation on test seeds.")
    return "\n".join(lines)


def _grouped(runs: Sequence[Run]) -> list[list[Run]]:
    named: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        named.setdefault((run.preset, run.algo, run.label), []).append(run)
    result: list[list[Run]] = []
    for members in (alike for same_name in named.values() for alike in _parted(same_name)):
        if len({run.seed for run in members}) == len(members):
            result.append(members)
        else:
            result += [[dataclasses.replace(run, label=str(run.path))] for run in members]
    return result


def _parted(runs: Sequence[Run]) -> list[list[Run]]:
    """Return runs of one name parted by their settings; each part's label tells the settings that set it apart."""
    parts: dict[frozenset[tuple[str, str]], list[Run]] = {}
    for run in runs:
        parts.setdefault(frozenset(run.settings.items()), []).append(run)
    shared = frozenset.intersection(*parts)
    own = [
        {name: value for name, value in part[0].settings.items() if (name, value) not in shared}
        for part in parts.values()
    ]
    labels = _told_apart(own)
    return [[_labelled(run, label) for run in part] for part, label in zip(parts.values(), labels, strict=True)]


def _told_apart(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a label for each of several different settings: those that it takes to tell it from the others.

    Kinds come first: where they differ, so does most of their section.
    """
    if len(settings) == 1:
        return [""]
    names = sorted({name: None for one in settings for name in one}, key=lambda name: not name.endswith("kind"))
    first = next(name for name in names if len({one.get(name) for one in settings}) > 1)
    labels = [""] * len(settings)
    for value in {one.get(first) for one in settings}:
        places = [place for place, one in enumerate(settings) if one.get(first) == value]
        further = _told_apart([settings[place] for place in places])
        for place, rest in zip(places, further, strict=True):
            # Who has no such setting has others in its place.
            own = [f"{name}={settings[place][name]}" for name in names if name in settings[place]]
            told = f"{first}={value}" if value is not None else "" if rest else "".join(own[:1])
            labels[place] = ", ".join(filter(None, (told, rest)))
    return labels


def _labelled(run: Run, label: str) -> Run:
    return dataclasses.replace(run, label=", ".join(part for part in (run.label, label) if part))


def _group(runs: Sequence[Run]) -> Group:
    first = runs[0]
    final = np.array([run.final_score for run in runs])
    name = " ".join(part for part in (first.preset, first.algo) if part) + (f" ({first.label})" if first.label else "")
    return Group(
        name=name,
        preset=first.preset,
        runs=tuple(runs),
        curve=learning_curve(runs),
        final_mean=mean_ci95(final, numpy_stream(0, "compare", purpose="mean")),
        final_iqm=estimate(final, iqm, numpy_stream(0, "compare", purpose="iqm")),
        solved=sum(run.env_steps_to_target is not None for run in runs),
        env_steps_to_target=_median([run.env_steps_to_target for run in runs]),
        wall_s_to_target=_median([run.wall_s_to_target for run in runs]),
        env_steps_per_s=_median([run.env_steps_per_s for run in runs]),
    )


def _median(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(np.median(present)) if present else None


def _row(group: Group) -> tuple[str, ...]:
    several, unfinished = len(group.runs) > 1, any(not run.finished for run in group.runs)

    def shown(value: Estimate) -> str:
        # One run says nothing about the spread over runs: no interval rather than one of width zero.
        bounds = f" [{number(value.low)}, {number(value.high)}]" if several else ""
        return f"{number(value.value)}{'*' if unfinished else ''}{bounds}"

    return (
        group.name,
        str(len(group.runs)),
        shown(group.final_mean),
        shown(group.final_iqm),
        f"{group.solved}/{len(group.runs)}",
        "-" if group.env_steps_to_target is None else count(group.env_steps_to_target),
        "-" if group.wall_s_to_target is None else duration(group.wall_s_to_target),
        "-" if group.env_steps_per_s is None else rate(group.env_steps_per_s),
    )
