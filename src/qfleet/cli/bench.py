"""`qfleet bench`: measures a suite, beside its peer where that has an environment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from qfleet.cli.flags import parse_options, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config

USAGE = "qfleet bench SUITE [--peers DIR] [--seeds K] [--first-seed N] [--json FILE] [--table FILE]"


class BenchOptions(Config):
    """Flags of `bench`."""

    suite: Literal["all", "solve", "replay", "learner", "envs", "fused", "pipeline", "inference", "stragglers", "start"]
    """What to measure: solve (CartPole to 475), replay (cycles, memory), learner (updates), envs (tensor-native games),
    fused (whole loops), pipeline (processes: edges, gain, Pong), start (import, host loop), or all."""
    peers: Path | None = None
    """Environment with the peers, made by benchmarks/peers/setup.sh; without it only our figures are measured."""
    seeds: int = Field(10, gt=0)
    """How many seeds `solve` takes."""
    first_seed: int = Field(101, ge=0)
    """The first of them; presets are tuned on seeds below 100."""
    json_file: Path | None = Field(None, alias="json")
    """Write the rows to this file."""
    table: Path | None = None
    """Write the table, as Markdown, to this file."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        options = [setting for setting in settings_of(BenchOptions, {}) if setting.name != "suite"]
        print(
            help_page(
                USAGE,
                "Measure a suite: all, solve, replay, learner, envs, fused, pipeline, inference, stragglers or start.",
                options,
            )
        )
        return 0
    given = parse_options(BenchOptions, words, "suite", USAGE)

    from qfleet.bench import envs, fused, inference, learner, pipeline, replay, solve, start, stragglers
    from qfleet.bench.table import Row, markdown, plain

    suites: dict[str, Callable[[], list[Row]]] = {
        "start": start.measure,
        "envs": envs.measure,
        "learner": learner.measure,
        "fused": lambda: fused.measure(given.peers),
        "pipeline": lambda: pipeline.measure(given.peers),
        "inference": inference.measure,
        "stragglers": stragglers.measure,
        "replay": lambda: replay.measure(given.peers),
        "solve": lambda: solve.measure(given.peers, range(given.first_seed, given.first_seed + given.seeds)),
    }
    results = {name: measure() for name, measure in suites.items() if given.suite in (name, "all")}
    page = markdown(results, f"qfleet bench {shlex.join(words)}")
    print(page)
    if given.json_file is not None:
        given.json_file.write_text(json.dumps(plain(results), indent=1) + "\n")
    if given.table is not None:
        given.table.write_text(page)
    return 0
