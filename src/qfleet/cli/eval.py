"""`qfleet eval`: plays with a run's kept model on fresh seeds, and records an episode on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from qfleet.cli.flags import parse_options, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config

USAGE = "qfleet eval RUN_DIR [--episodes N] [--seed N] [--record FILE.gif] [--json]"


class EvalOptions(Config):
    """Flags of `eval`."""

    run_dir: Path
    """The directory of the run."""
    episodes: int = Field(100, gt=0, le=100_000)
    """How many episodes to play."""
    seed: int = Field(0, ge=0, lt=2**63)
    """What the episodes' seeds derive from; those of training and validation are never among them."""
    record: Path | None = None
    """Write one more episode as an animated picture to this .gif file (extra: media)."""
    as_json: bool = Field(False, alias="json")
    """Print the result as JSON."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        options = [setting for setting in settings_of(EvalOptions, {}) if setting.name != "run_dir"]
        print(help_page(USAGE, "Play with a run's kept model on fresh seeds.", options))
        return 0
    given = parse_options(EvalOptions, words, "run_dir", USAGE)

    from qfleet import api
    from qfleet.observe.record import check_output

    if given.record is not None:
        check_output(given.record)
    returns = api.evaluate(given.run_dir, episodes=given.episodes, seed=given.seed)
    result = _result(returns, given)
    if given.record is not None:
        result["recording"] = _record(given.run_dir, given.record, given.seed)
    print(json.dumps(result) if given.as_json else _text(result))
    return 0


def _result(returns: Any, given: EvalOptions) -> dict[str, Any]:
    import numpy as np

    from qfleet.core.statistics import iqm, mean_ci95

    score = mean_ci95(returns, np.random.default_rng(0))
    return {
        "run_dir": str(given.run_dir),
        "seed": given.seed,
        "episodes": len(returns),
        "mean": score.value,
        "ci95": [score.low, score.high],
        "iqm": float(iqm(np.asarray(returns, np.float64))),
        "min": float(returns.min()),
        "max": float(returns.max()),
        "returns": returns.tolist(),
    }


def _record(run_dir: Path, output: Path, seed: int) -> dict[str, Any]:
    from qfleet import api
    from qfleet.experiment import Experiment
    from qfleet.observe.record import record_episode

    experiment = Experiment.from_yaml(run_dir / "config.yaml")
    recording = record_episode(experiment.env, api.load(run_dir), output, seed)
    return {"file": str(output), "score": recording.score, "steps": recording.steps, "complete": recording.complete}


def _text(result: dict[str, Any]) -> str:
    from qfleet.observe.text import count, interval, number

    lines = [
        f"{number(result['mean'])}{interval(result['ci95'])}, mean of {count(result['episodes'])} episodes"
        f" (IQM {number(result['iqm'])}, from {number(result['min'])} to {number(result['max'])})"
    ]
    if (recording := result.get("recording")) is not None:
        cut = "" if recording["complete"] else ", cut there"
        lines.append(
            f"recorded {recording['file']}: score {number(recording['score'])}, {recording['steps']} steps{cut}"
        )
    return "\n".join(lines)
