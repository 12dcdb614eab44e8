"""`qfleet bench`: measures a suite, beside its peer where that has an environment."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from qfleet.cli.flags import parse_options, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config

_FLAGS = {
    "peers": "[--peers DIR]",
    "seeds": "[--seeds K]",
    "first_seed": "[--first-seed N]",
    "json": "[--json [FILE]]",
    "table": "[--table FILE]",
}
USAGE = f"qfleet bench SUITE {' '.join(_FLAGS.values())}"
_EVERYWHERE = ("json", "table")
_PRINTED = Path("-")
_WIDTH = 78
_PONG = "Pong in processes, one update of 32 in 4 steps"


@dataclass(frozen=True)
class Suite:
    """What the help page of a suite says."""

    about: str
    rows: tuple[str, ...]
    """What it measures, a line for each row of its table or for rows of one kind."""
    flags: tuple[str, ...] = ()
    """The flags that it takes besides those of all suites."""


SUITES = {
    "start": Suite(
        "What qfleet costs besides the work itself.",
        (
            "import of all that training needs, more than `import torch`",
            "host loop and monitor, share of an inline run",
        ),
    ),
    "envs": Suite(
        "The tensor-native games alone, beside the packages that they come from.",
        ("random steps a second of each game with 1, 128 and 4,096 environments",),
    ),
    "learner": Suite(
        "Updates alone.",
        (
            "on a CPU: small networks beside plain torch",
            "on a GPU: whole updates of the Nature network, batch 32 and 1024",
        ),
    ),
    "fused": Suite(
        "The fused loop: learned steps a second.",
        (
            "on a CPU: PQN and DQN on CartPole beside plain eager loops and, with --peers, Stable-Baselines3",
            "on a GPU: PQN on CartPole and MinAtar Breakout",
        ),
        ("peers",),
    ),
    "pipeline": Suite(
        "The placement `processes`: what its edges cost, what it gains over inline, a slow environment, and Pong on"
        " this machine, with --peers beside Stable-Baselines3.",
        (
            "frames from one process to another",
            "weights of 7 MB, from before they are published to after they are copied",
            "messages, slots and supervisor at 10000 steps/s of frames, share of the CPU time of all",
            "an environment of 200 us a step, updates that cost as much as sampling: processes beside inline",
            "one of 8 environments 10 times slower than 200 us",
            "Pong as planned, one update of 32 in 200 steps: share of the time that the cores work",
            "on a GPU: Pong as planned beside the games alone, and share of the time that the GPU works",
            f"{_PONG}, fp32: share of its time that the learner works",
            f"{_PONG}, acting in bf16",
            f"{_PONG}, all in bf16",
            "acting alone in Pong",
            "acting alone in Pong, 64 games, bf16; the peer 32 games",
        ),
        ("peers",),
    ),
    "inference": Suite(
        "Where acting is fastest on this machine.",
        (
            "values of 4, 16 and 64 observations on one core, in bf16 beside fp32",
            "1, 2 and 4 actors of 4, 16 and 64 environments, served on each device beside local",
        ),
    ),
    "scaling": Suite(
        "Several learners on this machine's cores: their traffic, their speed, and a slow one among them.",
        (
            "bytes that one of 2, 3 and 4 ranks sends for an update, in each compressed form beside none",
            "transitions a second of 2 and 4 ranks of a small and 2, 3 and 4 of the Nature network, beside one",
            "parameter server, one of 4 workers 5 times slower: gradients a second, mode async beside sync",
        ),
    ),
    "replay": Suite(
        "The replay alone, with --peers beside cpprb.",
        (
            "prioritised sample + exact weights + write-back, 1M items, batch 32 and 512",
            "cost of that cycle at 10M items over 100k",
            "1M Atari frames in memory, plain and LZ4",
            "Pong frames decoded, one core",
        ),
        ("peers",),
    ),
    "solve": Suite(
        "CartPole to 475, with --peers beside Stable-Baselines3.",
        (
            "seconds of training, median of the seeds",
            "environment steps, median",
            "seeds whose kept model scores 475 or more over 100 unseen episodes",
        ),
        ("peers", "seeds", "first_seed"),
    ),
}


class BenchOptions(Config):
    """Flags of `bench`."""

    suite: Literal[
        "all",
        "solve",
        "replay",
        "learner",
        "envs",
        "fused",
        "pipeline",
        "inference",
        "scaling",
        "start",
    ]
    """What to measure."""
    peers: Path | None = None
    """Environment with the peers, made by benchmarks/peers/setup.sh; without it only our figures are measured."""
    seeds: int = Field(10, gt=0)
    """How many seeds `solve` takes."""
    first_seed: int = Field(101, ge=0)
    """The first of them; presets are tuned on seeds below 100."""
    json_file: Path | None = Field(None, alias="json")
    """Write the rows to this file; without a file, or as -, print them in place of the table."""
    table: Path | None = None
    """Write the table, as Markdown, to this file."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        print(_help(next((word for word in words if word in SUITES), "")))
        return 0
    given = parse_options(BenchOptions, _with_files(words), "suite", USAGE)

    from qfleet.bench import envs, fused, inference, learner, pipeline, replay, scaling, solve, start
    from qfleet.bench.table import Row, markdown, plain

    suites: dict[str, Callable[[], list[Row]]] = {
        "start": start.measure,
        "envs": envs.measure,
        "learner": learner.measure,
        "fused": lambda: fused.measure(given.peers),
        "pipeline": lambda: pipeline.measure(given.peers),
        "inference": inference.measure,
        "scaling": scaling.measure,
        "replay": lambda: replay.measure(given.peers),
        "solve": lambda: solve.measure(given.peers, range(given.first_seed, given.first_seed + given.seeds)),
    }
    results = {name: measure() for name, measure in suites.items() if given.suite in (name, "all")}
    page, rows = markdown(results, f"qfleet bench {shlex.join(words)}"), json.dumps(plain(results), indent=1)
    print(rows if given.json_file == _PRINTED else page)
    if given.json_file not in (None, _PRINTED):
        given.json_file.write_text(rows + "\n")
    if given.table is not None:
        given.table.write_text(page)
    return 0


def _with_files(words: Sequence[str]) -> list[str]:
    """Return the words with a file behind `--json` where there is none."""
    following = [*words, "--"][1:]
    bare = [word == "--json" and after.startswith("--") for word, after in zip(words, following, strict=True)]
    return [f"--json={_PRINTED}" if alone else word for word, alone in zip(words, bare, strict=True)]


def _help(name: str) -> str:
    """Return the help page of a suite, or of all if it is empty."""
    options = [setting for setting in settings_of(BenchOptions, {}) if setting.name != "suite"]
    if not name:
        lines = [f"{name:<11} {suite.about}" for name, suite in SUITES.items()]
        page = help_page(USAGE, "Measure a suite, or all of them.", options)
        return f"{page}\n\n{_listed('suites (`qfleet bench SUITE --help` lists the rows of one)', lines, 14)}"
    suite = SUITES[name]
    options = [setting for setting in options if setting.name in (*suite.flags, *_EVERYWHERE)]
    usage = " ".join(["qfleet bench", name, *(_FLAGS[setting.name] for setting in options)])
    return f"{help_page(usage, suite.about, options)}\n\n{_listed('rows', suite.rows, 4)}"


def _listed(title: str, lines: Sequence[str], indent: int) -> str:
    """Return lines under a title, as the flags are shown; what is too long goes on indented."""
    fill = textwrap.TextWrapper(
        _WIDTH, initial_indent="  ", subsequent_indent=" " * indent, break_on_hyphens=False
    ).fill
    return "\n".join([f" {title}", f" {'-' * _WIDTH}", *map(fill, lines)])
