"""What is said at the end of a run, and of several seeds together."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from qfleet.cli.errors import INTERRUPTED
from qfleet.core.statistics import estimate, iqm, mean_ci95
from qfleet.observe.text import count, duration, interval, number, rate

TARGET_MISSED = 4

Summary = Mapping[str, Any]


def exit_code(summary: Summary, target_given: bool) -> int:
    """Return the exit code of a run that came to its end or was stopped."""
    if summary["stopped_by"] == "interrupt":
        return INTERRUPTED
    return TARGET_MISSED if target_given and summary["solved"] is False else 0


def show_run(summary: Summary, run_dir: Path, quiet: bool) -> None:
    """Say what came of a run; a run that was stopped always says how to go on."""
    if summary["stopped_by"] == "interrupt":
        print(
            f"stopped at {count(summary['env_steps'])} steps and saved; go on with: qfleet resume {run_dir}",
            file=sys.stderr,
        )
    elif not quiet:
        _print(_title(summary), _lines(summary, run_dir))


def aggregate(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Return the summary of several seeds of one experiment; intervals are bootstrapped over the seeds."""
    first = summaries[0]
    scores = [summary["eval"]["mean"] for summary in summaries if summary["eval"] is not None]
    result: dict[str, Any] = {
        **{name: first[name] for name in ("preset", "algo", "target", "topology", "placement", "device")},
        "seeds": [summary["seed"] for summary in summaries],
        "runs": [f"seed-{summary['seed']}" for summary in summaries],
        "eval": None,
        "solved": None if first["target"] is None else sum(bool(summary["solved"]) for summary in summaries),
        "wall_s": sum(summary["wall_s"] for summary in summaries),
        "env_steps": sum(summary["env_steps"] for summary in summaries),
        **{name: first[name] for name in ("versions", "git", "hardware")},
    }
    if scores:
        mean = mean_ci95(scores, np.random.default_rng(0))
        middle = estimate(scores, iqm, np.random.default_rng(0))
        result["eval"] = {
            "mean": mean.value,
            "ci95": [mean.low, mean.high],
            "iqm": middle.value,
            "iqm_ci95": [middle.low, middle.high],
            "scores": scores,
        }
    return result


def show_aggregate(result: Summary, run_dir: Path, quiet: bool) -> None:
    """Say what came of several seeds."""
    if quiet:
        return
    score = result["eval"]
    lines = [] if score is None else [("scores", "  ".join(number(value) for value in score["scores"]))]
    if score is not None:
        lines.append(("mean", f"{number(score['mean'])}{interval(score['ci95'])}"))
        lines.append(("IQM", f"{number(score['iqm'])}{interval(score['iqm_ci95'])}"))
    if result["solved"] is not None:
        lines.append(("target", f"{number(result['target'])} reached by {result['solved']} of {len(result['seeds'])}"))
    lines += [("files", str(run_dir)), ("next", f"qfleet compare {run_dir} --output curves.png")]
    _print(f"{result['preset']} ({result['algo']}), {len(result['seeds'])} seeds", lines)


def _title(summary: Summary) -> str:
    outcome = {True: "solved", False: "target not reached", None: "finished"}[summary["solved"]]
    return f"{summary['preset']} ({summary['algo']}, seed {summary['seed']}): {outcome}"


def _lines(summary: Summary, run_dir: Path) -> list[tuple[str, str]]:
    lines = []
    if (score := summary["eval"]) is not None:
        text = f"{number(score['mean'])}{interval(score['ci95'])}, mean of {score['episodes']} test episodes"
        lines.append(("score", text))
    speed = f"{rate(summary['env_steps_per_s'])} steps/s"
    steps = f"{count(summary['env_steps'])} steps, {count(summary['updates'])} updates"
    lines.append(("trained", f"{steps} in {duration(summary['wall_s'])} ({speed})"))
    if summary["target"] is not None:
        reached = "not reached"
        if summary["env_steps_to_target"] is not None:
            after = duration(summary["wall_s_to_target"] or 0.0)
            reached = f"reached after {count(summary['env_steps_to_target'])} steps, {after}"
        lines.append(("target", f"{number(summary['target'])} {reached}"))
    lines.append(("files", str(run_dir)))
    lines.append(("next", f"qfleet eval {run_dir} --record play.gif"))
    return lines


def _print(title: str, lines: Sequence[tuple[str, str]]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(title, style="bold"))
    for label, text in lines:
        console.print(Text.assemble((f"  {label:<9}", "dim"), text))
