"""Reads what a comparison needs from the directory of a run: who it was, its evaluations and its result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError, QfleetError
from qfleet.observe.sinks import read_jsonl
from qfleet.observe.text import known

Numbers = NDArray[np.float64]
_FILES = ("config.yaml", "events.jsonl", "summary.json")
_NO_DIFFERENCE = ("format", "seed", "address", "strict", "checkpoint", "track")
"""Settings and sections that change neither what is learned nor how it is judged; the seed is looked at by itself."""
_SEED_DIRECTORY = re.compile(r"seed-(\d+)")


@dataclass(frozen=True)
class Run:
    """One run as a comparison sees it."""

    path: Path
    preset: str
    algo: str
    label: str
    """What tells this run from others of the same preset and algorithm; empty for nothing."""
    seed: int | None
    settings: Mapping[str, str]
    """What its config.yaml says, by dotted name as text, without what makes no difference to a comparison."""
    env_steps: Numbers  # [N] of the evaluations, strictly increasing
    scores: Numbers  # [N] their means
    final_score: float
    """Mean of the final evaluation on test seeds; of the last validation while the run has none."""
    finished: bool
    """Whether `final_score` is from test seeds."""
    env_steps_to_target: float | None
    wall_s_to_target: float | None
    env_steps_per_s: float | None


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs in some directories, each once; one that holds `seed-K` directories stands for all of them."""
    runs: dict[Path, Run] = {}
    for path in paths:
        for directory, label in _directories(path):
            runs.setdefault(directory.resolve(), load_run(directory, label))
    return list(runs.values())


def load_run(directory: Path, label: str = "") -> Run:
    """Return one run; anything missing or damaged is an error that names the file."""
    config_file, events_file, summary_file = (directory / name for name in _FILES)
    for file in (config_file, events_file):
        if not file.is_file():
            raise ConfigError(f"{directory} holds no run: there is no {file.name} in it")
    events = read_jsonl(events_file)
    summary = _read_summary(summary_file)
    started: list[dict[str, Any]] = [event for event in events if event.get("event") == "started"]
    who = {**(started[-1] if started else {}), **summary}
    if not isinstance(who.get("preset"), str):
        raise QfleetError(f"{summary_file} does not say which preset was trained; has the run ended?")
    env_steps, scores = _evaluations(events, events_file)
    final = summary.get("eval")
    test_score = known(final, "mean") if isinstance(final, dict) else None
    seed = known(who, "seed")
    return Run(
        path=directory,
        preset=who["preset"],
        algo=str(who.get("algo") or ""),
        label=label or str(who.get("label") or ""),
        seed=None if seed is None else int(seed),
        settings=_read_settings(config_file),
        env_steps=env_steps,
        scores=scores,
        final_score=float(scores[-1]) if test_score is None else test_score,
        finished=test_score is not None,
        env_steps_to_target=known(summary, "env_steps_to_target"),
        wall_s_to_target=known(summary, "wall_s_to_target"),
        env_steps_per_s=known(summary, "env_steps_per_s"),
    )


def _directories(path: Path) -> list[tuple[Path, str]]:
    """Return (run directory, label) of one path that a user gave."""
    if not path.is_dir():
        raise ConfigError(
            f"{path} is not a directory; give the directories of runs, as in: qfleet compare runs/a runs/b"
        )
    numbered = [(int(match[1]), child) for child in path.iterdir() if (match := _SEED_DIRECTORY.fullmatch(child.name))]
    return [(child, str(path)) for _, child in sorted(numbered)] or [(path, "")]


def _read_settings(path: Path) -> dict[str, str]:
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as a configuration ({error})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: is not the configuration of a run")
    return dict(_flattened({name: value for name, value in tree.items() if name not in _NO_DIFFERENCE}))


def _flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the text of every setting."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def _read_summary(path: Path) -> dict[str, Any]:
    """Return summary.json, or nothing for a run that has not ended."""
    try:
        summary = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise QfleetError(f"cannot read {path}: {error}") from error
    if not isinstance(summary, dict):
        raise QfleetError(f"{path} is not the summary of a run")
    return summary


def _evaluations(events: Sequence[Mapping[str, Any]], file: Path) -> tuple[Numbers, Numbers]:
    """Return (env steps [N], mean scores [N]) of the history that the run kept.

    A run that was killed and resumed repeats steps: an evaluation undoes earlier ones at or after its own step.
    """
    kept: list[tuple[float, float]] = []
    for event in events:
        if event.get("event") != "evaluation":
            continue
        at, score = known(event, "env_steps"), known(event, "mean")
        if at is None or score is None:
            raise QfleetError(f"{file} has an evaluation without finite 'env_steps' and 'mean': {dict(event)}")
        while kept and kept[-1][0] >= at:
            kept.pop()
        kept.append((at, score))
    if not kept:
        raise QfleetError(f"{file} holds no evaluation yet; compare the run when it has had its first one")
    table = np.array(kept)
    return table[:, 0], table[:, 1]
