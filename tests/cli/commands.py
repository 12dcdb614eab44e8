"""What the tests of the command line share: running a command in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from qfleet.cli.main import main

TINY = (
    "--env-steps", "1200", "--evaluation.every", "400", "--evaluation.episodes", "4", "--evaluation.envs", "4",
    "--evaluation.test-episodes", "6", "--network.hidden", "32", "32", "--learner.learning-starts", "100",
)  # fmt: skip
"""Flags that make `train cartpole` take about a second."""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def command(capsys: pytest.CaptureFixture[str], *words: str) -> Outcome:
    capsys.readouterr()
    code = main(list(words))
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


def real_command(words: Sequence[str], cwd: Path) -> Outcome:
    done = subprocess.run(start_words(words), cwd=cwd, capture_output=True, text=True, timeout=120, env=environment())
    return Outcome(done.returncode, done.stdout, done.stderr)


def start_words(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "qfleet", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
