"""`qfleet scale`: changes how many actors, learner ranks or shards a running run has, from wherever its disk is."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from qfleet.cli.flags import parse_options, wants_help
from qfleet.core.config import Config
from qfleet.core.errors import ConfigError, QfleetError
from qfleet.observe.text import one_line

if TYPE_CHECKING:
    from qfleet.runtime.ownership import Owner

USAGE = "qfleet scale RUN_DIR [--actors N] [--learners N] [--shards N]"
WAIT_S, LOOK_S = 120.0, 0.1
"""How long the change is waited for, and how often it is looked for."""


class ScaleOptions(Config):
    """Flags of `scale`."""

    run_dir: Path
    """The directory of the run."""
    actors: int | None = Field(None, gt=0)
    """How many actors it should have, between elastic.min_actors and elastic.max_actors."""
    learners: int | None = Field(None, gt=0)
    """How many learner ranks should share each update, up to elastic.max_learners; the batch stays the same."""
    shards: int | None = Field(None, gt=0)
    """In how many processes the replay should be, up to elastic.max_shards; what it holds stays the same."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        print(
            f"usage: {USAGE}\n\nChange how many actors, learners or replay shards a run has while it goes on. Room for"
            " more than it\nbegan with is kept by --elastic.max_actors, --elastic.max_learners and"
            " --elastic.max_shards of `qfleet train`."
        )
        return 0
    given = parse_options(ScaleOptions, words, "run_dir", USAGE)
    if given.actors is None and given.learners is None and given.shards is None:
        raise ConfigError(f"scale needs --actors N, --learners N or --shards N; usage: {USAGE}")

    from qfleet.operating import one_run, standing
    from qfleet.runtime import ownership

    path = one_run(given.run_dir)
    _require_scalable(path)
    if (now := standing(path)).state != "running":
        raise ConfigError(f"{path} cannot be scaled: it is not running ({now.state})")
    request = ownership.request_scale(path, given.actors, given.learners, given.shards)
    answer = _answer(path, request, now.owner)
    if not answer["applied"]:
        raise ConfigError(f"{path} was not scaled: {answer['text']}")
    print(f"{path} has {answer['text']}")
    return 0


def _require_scalable(path: Path) -> None:
    """Raise ConfigError for a run whose roles cannot come and go."""
    from qfleet.experiment import Experiment

    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path} cannot be scaled yet: it still plans, ask again when it trains")
    experiment = Experiment.from_yaml(path / "config.yaml")
    if not experiment.scalable:
        raise ConfigError(
            f"{path} cannot be scaled: its roles step in a fixed order or without a replay; runs of agents with a"
            " replay can be, in placement 'processes' or 'ray' without lockstep"
        )


def _answer(path: Path, request: str, asked: Owner | None) -> dict[str, Any]:
    """Wait for the event that answers a request; nobody answers one to an owner that is gone, not even the next."""
    from qfleet.observe.sinks import read_jsonl
    from qfleet.runtime import ownership

    until, waits = time.monotonic() + WAIT_S, ""
    while True:
        sight = ownership.look(path)  # first: what it said before its end is then all there
        events = read_jsonl(path / "events.jsonl") if (path / "events.jsonl").is_file() else []
        for event in events:
            if event.get("request") != request:
                continue
            if event.get("event") == "scaled":
                return event
            if event.get("event") == "waiting" and not waits:
                waits = one_line(str(event.get("text", "")))
                print(f"{path}: {waits}", file=sys.stderr)
        if not sight.alive or sight.owner != asked:
            raise QfleetError(f"{path} has ended before it was scaled")
        if time.monotonic() >= until:
            raise QfleetError(
                f"{path} was asked to scale and has not done so after {WAIT_S:.0f} s"
                f"{f' ({waits})' if waits else ''}; it may still do so: look for `scaled` in `qfleet logs {path}`"
            )
        time.sleep(LOOK_S)
