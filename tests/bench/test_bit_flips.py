"""The program that flips bits in checkpoints: 100 flips in those of a real run, all noticed, none loaded."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import qfleet


def test_a_hundred_flipped_bits_are_noticed_named_and_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("benchmarks")
    flips = importlib.import_module("bit_flips")
    changes = {**flips.REPLAY, "env_steps": 1500, "checkpoint.every": 600}
    run = qfleet.train(flips.short("prioritised", changes), seed=4, run_dir=tmp_path / "run")
    target, rng = flips.Target.of(run.dir / "checkpoints"), np.random.default_rng(4)
    counts = Counter(what for index in range(100) for what in target.flip(rng, index % 2 == 0))
    assert counts["noticed"] == counts["file named"] == 100
    assert counts["loaded wrong"] == counts["none left"] == 0
    assert counts["previous used"] > 0
    assert counts["put right"] > 0
